// States per segment, on a GPU.
#include "tests/gpu/on_gpu.hpp"
#include "tests/support/segments_tests.hpp"
