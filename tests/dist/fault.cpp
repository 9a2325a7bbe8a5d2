// Ranks of which one fails on purpose: fault MODE DEVICE. The victim is rank size - 1. The others
// print what the communicator tells them and exit with the kind's status, as the command does.
//
//     stop       the victim stops (SIGSTOP) and never comes to the exchange
//     stop-ring  the same, seen through a ring: not every rank waits for the victim itself
//     kill       the victim dies (SIGKILL)
//     abort      the victim meets an error of its own and tells the others
//     skip       the victim leaves out one exchange
//     differ     the victim gives another value for an argument
//     start      the victim stops before MPI is initialised
//     make       the victim stops before the communicator is made
//     share      all ranks see one GPU only
//     end        the victim stops before MPI is finalised
#include <mpi.h>

#include <csignal>
#include <cstdio>
#include <string>

#include "comm/transport.hpp"
#include "longspan/buffer.hpp"
#include "longspan/communicator.hpp"
#include "longspan/error.hpp"
#include "longspan/info.hpp"
#include "src/env.hpp"

namespace {

using namespace longspan;

constexpr std::size_t kBytes = 1 << 16;

struct Ranks {
  Communicator world;
  Buffer send, recv;

  explicit Ranks(Device device)
      : world(from_environment({.device = device})),
        send(device, kBytes),
        recv(device, kBytes * world.size()) {}

  void exchange(const char* step) {
    world.transport().all_gather(send.data(), recv.data(), kBytes, {}, step);
    world.transport().wait({}, step);
  }
  void ring(const char* step) {
    for (int turn = 1; turn < world.size(); ++turn)
      world.transport().shift(send.data(), recv.data(), kBytes, 1, {}, step);
    world.transport().wait({}, step);
  }
};

void run(const std::string& mode, Device device) {
  const bool last = env_text("OMPI_COMM_WORLD_RANK") && env_text("OMPI_COMM_WORLD_SIZE") &&
                    std::stoi(*env_text("OMPI_COMM_WORLD_RANK")) + 1 ==
                        std::stoi(*env_text("OMPI_COMM_WORLD_SIZE"));
  if (mode == "start" && last) std::raise(SIGSTOP);
  if (mode == "make") {
    MPI_Init(nullptr, nullptr);
    if (last) std::raise(SIGSTOP);
  }
  Ranks ranks(device);
  const bool victim = ranks.world.rank() == ranks.world.size() - 1;
  ranks.exchange("warm up");
  if (mode == "differ") agree(ranks.world, {{"heads", victim ? "16" : "32"}}, "make the layer");
  if (victim) {
    std::fflush(nullptr);
    if (mode.starts_with("stop")) std::raise(SIGSTOP);
    if (mode == "kill") std::raise(SIGKILL);
    if (mode == "abort") {
      const InputError error("k.npy is truncated");
      ranks.world.abort(error.what());
      throw error;
    }
    if (mode == "skip") {
      ranks.world.barrier("the end");
      return;
    }
  }
  if (mode == "stop-ring")
    ranks.ring("ring");
  else
    ranks.exchange("states");
  ranks.world.barrier("the end");
  if (mode == "end" && victim) std::raise(SIGSTOP);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  const Device device = argc > 2 && std::string(argv[2]) == "cuda" ? Device::cuda : Device::host;
  const int ranks = std::stoi(env_text("OMPI_COMM_WORLD_SIZE").value_or("1"));
  if (device == Device::cuda && gpu_count() < (mode == "share" ? 1 : ranks)) {
    std::printf("Skipped: %d ranks want a GPU each, and there are %d.\n", ranks, gpu_count());
    return 77;
  }
  try {
    run(mode, device);
    return 0;
  } catch (const RankError& error) {
    std::fprintf(stderr, "SAW rank=%d step=%s kind=%d: %s\n", error.rank(), error.step().c_str(),
                 static_cast<int>(error.kind()), error.what());
    return static_cast<int>(error.kind());
  } catch (const Error& error) {
    std::fprintf(stderr, "ERR kind=%d: %s\n", static_cast<int>(error.kind()), error.what());
    return static_cast<int>(error.kind());
  }
}
