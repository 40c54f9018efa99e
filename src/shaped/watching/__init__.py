"""Is this run about to die? The quantities of `shaped.diagnose` while a model trains, and alarms."""

from shaped.watching.alarms import Alarm as Alarm
from shaped.watching.rows import Row as Row
from shaped.watching.watcher import Watcher as Watcher
from shaped.watching.watcher import watch as watch
