// States to where they travel from, on a GPU.
#include "tests/gpu/on_gpu.hpp"
#include "tests/support/pack_states_tests.hpp"
