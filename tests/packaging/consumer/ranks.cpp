#include "ranks.hpp"

#include <cstdio>

#include <longspan/longspan.hpp>

int say_ranks() {
  try {
    const longspan::Communicator world = longspan::from_environment();
    const auto all = world.gather("x", "test");
    std::printf("rank %d of %zu ranks\n", world.rank(), all.size());
    return 0;
  } catch (const longspan::Unsupported& error) {
    std::printf("%s\n", error.what());
    return 3;
  }
}
