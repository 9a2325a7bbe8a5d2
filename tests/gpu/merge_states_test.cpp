// The edges of a merge of states, on a GPU.
#include "tests/gpu/on_gpu.hpp"
#include "tests/support/merge_states_tests.hpp"
