// Sequences that share their keys, on a GPU.
#include "tests/gpu/on_gpu.hpp"
#include "tests/support/shared_keys_tests.hpp"
