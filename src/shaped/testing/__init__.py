"""Checks for layers that you write yourself. They need no pytest: a check that fails raises an AssertionError.

from shaped.testing import check_contract

def test_my_layer():
    check_contract(MyLayer(gamma=0.8))
"""

from shaped.testing.contract import check_contract as check_contract
from shaped.testing.drift import check_drift_of_branch as check_drift_of_branch
from shaped.testing.drift import check_drift_of_steps as check_drift_of_steps
from shaped.testing.law import check_module as check_module
from shaped.testing.law import check_Sigma_of_steps as check_Sigma_of_steps
from shaped.testing.law import check_survival as check_survival
from shaped.testing.limit import check_batches as check_batches
from shaped.testing.limit import check_chain as check_chain
from shaped.testing.limit import check_noise as check_noise
from shaped.testing.limit import check_permutation as check_permutation
from shaped.testing.limit import check_Sigma as check_Sigma
from shaped.testing.limit import check_solver_step as check_solver_step
from shaped.testing.limit import check_symmetry as check_symmetry
from shaped.testing.stats import assert_covariance as assert_covariance
from shaped.testing.stats import assert_distribution as assert_distribution
from shaped.testing.stats import assert_mean as assert_mean
from shaped.testing.stats import assert_rejected as assert_rejected
from shaped.testing.stats import assert_same_moments as assert_same_moments
from shaped.testing.stats import generator as generator
from shaped.testing.stats import random_covariance as random_covariance
from shaped.testing.stats import seed as seed
