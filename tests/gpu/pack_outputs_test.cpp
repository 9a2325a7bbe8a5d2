// Copies a part to the place that it is sent from, on a GPU.
#include "tests/gpu/on_gpu.hpp"
#include "tests/support/pack_outputs_tests.hpp"
