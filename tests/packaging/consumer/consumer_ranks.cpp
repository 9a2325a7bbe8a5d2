#include "ranks.hpp"

int main() { return say_ranks(); }
