// Faults of a request's arrays, found on a GPU.
#include "tests/gpu/on_gpu.hpp"
#include "tests/support/check_arrays_tests.hpp"
