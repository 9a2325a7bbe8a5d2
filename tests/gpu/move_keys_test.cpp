// Moves keys from a place of any form to another, on a GPU.
#include "tests/gpu/on_gpu.hpp"
#include "tests/support/move_keys_tests.hpp"
