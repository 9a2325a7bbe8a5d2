// Copies states to the place that they are sent from, on a GPU.
#include "tests/gpu/on_gpu.hpp"
#include "tests/support/pack_states_tests.hpp"
