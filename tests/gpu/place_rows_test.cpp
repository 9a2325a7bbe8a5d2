// Copies rows to their places, on a GPU.
#include "tests/gpu/on_gpu.hpp"
#include "tests/support/place_rows_tests.hpp"
