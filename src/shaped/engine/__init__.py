"""Runs a Markov chain of covariances for many samples.

Samples are cut into blocks whose size depends on the process, the number of tokens and the kind of device alone. A block has its own
stream of random numbers and is always computed as a whole, on one thread. So results do not depend on how many blocks are computed at a
time, or on which machine.
"""

from shaped.engine.block import use_one_thread as use_one_thread
from shaped.engine.block import without_autocast as without_autocast
from shaped.engine.executors import PickledChunks as PickledChunks
from shaped.engine.executors import scatter as scatter
from shaped.engine.options import Record as Record
from shaped.engine.options import RunOptions as RunOptions
from shaped.engine.process import PointProcess as PointProcess
from shaped.engine.process import Process as Process
from shaped.engine.progress import Progress as Progress
from shaped.engine.progress import progress_bar as progress_bar
from shaped.engine.simulation import allocate as allocate
from shaped.engine.simulation import run as run
from shaped.engine.start import check_rank as check_rank
from shaped.engine.start import count_tokens as count_tokens
from shaped.engine.start import draw_start as draw_start
from shaped.engine.start import prepare_start as prepare_start
from shaped.engine.start import take_block as take_block
from shaped.engine.walk import Bounds as Bounds
