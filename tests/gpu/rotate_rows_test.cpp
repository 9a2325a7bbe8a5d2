// Rotated query rows, on a GPU.
#include "tests/gpu/on_gpu.hpp"
#include "tests/support/rotate_rows_tests.hpp"
