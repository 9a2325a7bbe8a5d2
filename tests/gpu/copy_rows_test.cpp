// Blocks of rows, on a GPU.
#include "tests/gpu/on_gpu.hpp"
#include "tests/support/copy_rows_tests.hpp"
