// One rank of an all-gather over the TCP transport, which bench/tcp_vs_gloo.py starts as a launcher
// would (RANK, WORLD_SIZE, MASTER_ADDR, LONGSPAN_PORT). Calls follow each other without other work
// between them, and are timed in blocks. Rank 0 prints, as JSON, the time of a call in each block,
// the mean over the ranks.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <iostream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <vector>

#include "comm/transport.hpp"
#include "longspan/communicator.hpp"

namespace {

using longspan::comm::Transport;

/// The data of rank r.
std::byte value(std::size_t rank) { return static_cast<std::byte>(31 * rank + 1); }

/// Microseconds of a call in each block, after blocks to warm up. The result is checked after each
/// block.
std::vector<float> measure(Transport& transport, std::size_t bytes, int block, int blocks) {
  using Clock = std::chrono::steady_clock;
  const auto ranks = static_cast<std::size_t>(transport.size());
  const std::vector<std::byte> mine(bytes, value(static_cast<std::size_t>(transport.rank())));
  std::vector<std::byte> all(ranks * bytes);
  std::vector<float> times;
  for (int turn = -2; turn < blocks; ++turn) {
    std::fill(all.begin(), all.end(), std::byte{0});
    const auto begin = Clock::now();
    for (int i = 0; i < block; ++i)
      transport.all_gather(mine.data(), all.data(), bytes, {}, "the benchmark");
    const std::chrono::duration<float, std::micro> spent = Clock::now() - begin;
    if (turn >= 0) times.push_back(spent.count() / static_cast<float>(block));
    for (std::size_t i = 0; i < all.size(); ++i)
      if (all[i] != value(i / bytes)) throw std::runtime_error("a wrong result");
  }
  return times;
}

}  // namespace

int main(int argc, char** argv) try {
  std::size_t bytes = 4096;
  int block = 20, blocks = 20;
  CLI::App app("One rank of an all-gather over TCP");
  app.add_option("--bytes", bytes, "of each rank")->check(CLI::PositiveNumber);
  app.add_option("--block", block, "calls that are timed together")->check(CLI::PositiveNumber);
  app.add_option("--blocks", blocks, "so many times")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);

  const longspan::Communicator world = longspan::from_environment();
  Transport& transport = longspan::comm::transport_of(world);
  const std::vector<float> mine = measure(transport, bytes, block, blocks);
  std::vector<float> all(mine.size() * static_cast<std::size_t>(world.size()));
  transport.all_gather(mine.data(), all.data(), mine.size() * sizeof mine[0], {}, "the times");
  if (world.rank() != 0) return 0;
  std::vector<float> mean(mine.size());
  for (std::size_t i = 0; i < all.size(); ++i)
    mean[i % mine.size()] += all[i] / static_cast<float>(world.size());
  std::cout << nlohmann::json{{"transport", transport.describe()}, {"us", mean}} << '\n';
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench_tcp_gather: %s\n", error.what());
  return 1;
}
