// A part to where it travels from, on a GPU.
#include "tests/gpu/on_gpu.hpp"
#include "tests/support/pack_outputs_tests.hpp"
