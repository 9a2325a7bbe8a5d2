// Copies keys to rows side by side, on a GPU.
#include "tests/gpu/on_gpu.hpp"
#include "tests/support/copy_keys_tests.hpp"
