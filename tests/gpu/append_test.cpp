// New keys and values into a cache, on a GPU.
#include "tests/gpu/on_gpu.hpp"
#include "tests/support/append_tests.hpp"
