// Ranks of which one fails on purpose: fault MODE DEVICE [EXCHANGE [graph]]. The victim is rank
// size - 1. The others print the communicator's error, with the seconds since they began the
// failing step, and exit with the kind's status, as the command does.
//
// Without EXCHANGE the step is a collective of the communicator. With "peer-buffers" or "gather" it
// is a run of a layer whose states travel that way, and with "graph" the replay of one. With "ring"
// it is a run of ring-kv, in which the victim gets as far as the beginning of the second step. With
// "levels" it is one of heads+ring-kv on nodes of two ranks, in which it gets as far as the first.
// With "heads" it is one of heads, on GPUs, in which rows have come and finished ones do not go
// back. With "keys" it is one of gather-kv, in which the others attend already and wait for the
// victim's keys. With "backward" it is a backward of ring-kv, in which the victim gets as far as
// the second step. With "dq" it is one of gather-states with all rows on every rank, to which the
// victim does not come.
//
//     stop       the victim stops (SIGSTOP) and never comes to the exchange
//     stop-ring  the same, seen through a ring: not every rank waits for the victim itself
//     kill       the victim dies (SIGKILL)
//     kill-late  the same when its own part is queued and the others have not begun theirs
//     abort      the victim meets an error of its own and tells the others
//     skip       the victim leaves out one exchange
//     differ     the victim gives another value for an argument; runs the layer with fewer tokens
//     length     the victim runs the layer on a sequence of another length
//     start      the victim stops before MPI is initialised
//     make       the victim stops before the communicator is made
//     share      all ranks see one GPU only
//     end        the victim stops before MPI is finalised
//     single     every rank has initialised MPI for a single thread
//     crowded    the victim cannot start a thread when it comes to MPI
//     crowded-end  no rank can start a thread any more once the communicator is made
#include <mpi.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/transport.hpp"
#include "longspan/longspan.hpp"
#include "src/base/env.hpp"
#include "tests/dist/replay.hpp"
#include "tests/support/no_threads.hpp"
#include "tests/support/stumbling_transport.hpp"

namespace {

using namespace longspan;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kBytes = 1 << 16;
constexpr auto kMoment = std::chrono::milliseconds(500);  // in which every rank gets to its wait

/// The options of the command line.
struct Asked {
  std::string mode;
  Device device = Device::host;
  std::string exchange;  // empty: collectives
  bool graph = false;
};

/// Thrown on every rank.
struct Skipped {
  std::string why;
};

Clock::time_point began;

struct Ranks {
  Communicator world;
  Buffer send, recv;

  static Communicator on_its_gpu(Device device) {
    const Communicator world = from_environment({.device = device});
    world.make_current();
    return world;
  }

  explicit Ranks(Device device)
      : world(on_its_gpu(device)), send(device, kBytes), recv(device, kBytes * world.size()) {}

  void exchange(const char* step) {
    comm::transport_of(world).all_gather(send.data(), recv.data(), kBytes, {}, step);
    comm::transport_of(world).wait({}, step);
  }
  void ring(const char* step) {
    for (int turn = 1; turn < world.size(); ++turn)
      comm::transport_of(world).shift(send.data(), recv.data(), kBytes, 1, {}, step);
    comm::transport_of(world).wait({}, step);
  }
};

Buffer zeroed(Device device, std::size_t bytes) {
  Buffer buffer(device, bytes);
  buffer.upload(std::vector<std::byte>(bytes).data());
  return buffer;
}

/// A layer that verifies a few drafts.
class Drafts {
 public:
  Drafts(const Communicator& world, const Asked& asked)
      : q_(zeroed(world.device(), kTokens * kHeads * kDim * 2)),
        out_(zeroed(world.device(), q_.bytes())),
        keys_(zeroed(world.device(), kKeys * kKvHeads * kDim * 2)),
        layer_(world, {.heads = kHeads,
                       .kv_heads = kKvHeads,
                       .head_dim = kDim,
                       .limits = {.max_tokens = kTokens},
                       .exchange = asked.exchange == "peer-buffers" ? Exchange::automatic
                                                                    : Exchange::gather}),
        replay_(world.device(), [this](Stream stream) { queue(stream); }),
        graph_(asked.graph) {
    if (asked.exchange == "peer-buffers" && !layer_.exchange().has_peer_buffers())
      throw Skipped{"exchange by peer buffers is not available here: " + layer_.exchange().reason};
  }

  void run(std::int64_t tokens = kTokens, std::int64_t length = kKeys) {
    start(tokens, length);
    layer_.wait(replay_.stream());
  }
  void start(std::int64_t tokens = kTokens, std::int64_t length = kKeys) {
    tokens_ = tokens;
    length_ = length;
    if (graph_ && warm_)
      replay_.again();
    else
      replay_.eager();
    warm_ = true;
  }

  static constexpr std::int64_t kTokens = 4, kKeys = 5000;

 private:
  static constexpr int kHeads = 8, kKvHeads = 2, kDim = 64;

  void queue(Stream stream) {
    const Communicator& world = layer_.world();
    const auto rows = [&](const Buffer& buffer, std::int64_t count, int heads) {
      return Tensor(buffer.data(), DType::bf16, {count, heads, kDim}, world.device());
    };
    layer_.run({.q = rows(q_, tokens_, kHeads),
                .k = rows(keys_, kKeys, kKvHeads),
                .v = rows(keys_, kKeys, kKvHeads),
                .out = rows(out_, tokens_, kHeads),
                .total_keys = length_},
               stream);
  }

  Buffer q_, out_, keys_;
  Attention layer_;
  std::int64_t tokens_ = kTokens, length_ = kKeys;
  tests::Replay replay_;
  bool graph_, warm_ = false;
};

/// How the data of a layer travel.
struct Travel {
  const char* strategy;
  int heads;
  int per_node = 0;  // with several ranks in a node each has a head, and the nodes are the ring
  DType dtype = DType::fp32;
  bool backward = false;
  bool replicated = false;  // all rows on every rank
  Exchange exchange = Exchange::automatic;
};

/// A layer whose keys travel around the ranks, or whose rows go to the ranks with their heads, and
/// its backward.
class Ring {
 public:
  Ring(const Communicator& world, const Travel& travel)
      : heads_(travel.heads),
        dtype_(travel.dtype),
        in_(zeroed(world.device(), kTokens * heads_ * kDim * 4)),
        values_(zeroed(world.device(), in_.bytes())),
        out_(zeroed(world.device(), in_.bytes())),
        lse_(zeroed(world.device(), kTokens * heads_ * 4)),
        layer_(world, options(world, travel)) {
    for (Buffer& gradient : gradients_) gradient = zeroed(world.device(), in_.bytes());
    if (!travel.replicated) args_.total_tokens = kTokens * world.size();
    args_.total_keys = kTokens * world.size();
    args_.q = args_.k = rows(in_);
    args_.v = rows(values_);
    args_.out = rows(out_);
    args_.lse =
        Lse::tokens_heads(Tensor(lse_.data(), DType::fp32, {kTokens, heads_}, world.device()));
  }

  void run() {
    layer_.run(args_);
    layer_.wait();
  }
  void backward(DType dout = DType::fp32) {
    GradientArgs back{.run = args_, .dout = rows(in_)};
    back.dout.dtype = dout;
    back.dq = rows(gradients_[0]);
    back.dk = rows(gradients_[1]);
    back.dv = rows(gradients_[2]);
    layer_.backward(back);
    layer_.wait();
  }

 private:
  static Options options(const Communicator& world, const Travel& travel) {
    Options o{.heads = travel.heads,
              .kv_heads = travel.heads,
              .head_dim = kDim,
              .dtypes = {.compute = travel.dtype},
              .limits = {.max_tokens = kTokens, .max_kv_len = kTokens * world.size()},
              .keys = {Layout::zigzag},
              .gradients = travel.backward,
              .strategy = travel.strategy,
              .ranks_per_node = travel.per_node,
              .exchange = travel.exchange};
    if (!travel.replicated) o.queries = Sharding{Layout::zigzag};
    return o;
  }
  Tensor rows(const Buffer& buffer) const {
    return Tensor(buffer.data(), dtype_, {kTokens, heads_, kDim}, layer_.world().device());
  }

  static constexpr std::int64_t kTokens = 300, kDim = 64;
  int heads_;
  DType dtype_;
  Buffer in_, values_, out_, lse_;
  std::array<Buffer, 3> gradients_;
  Attention layer_;
  AttentionArgs args_;
};

/// Stops this rank until mpirun wakes it to end it. A rank that communicates with mpirun then makes
/// it hang now and then ("PMIX ERROR: UNREACHABLE", Open MPI 4.1), so this one ends.
[[noreturn]] void stop() {
  std::raise(SIGSTOP);
  std::_Exit(0);
}

/// The victim's part in a run that it takes part in; false: it has none.
bool misbehave(const std::string& mode, Drafts& drafts) {
  if (mode == "differ") {
    drafts.run(Drafts::kTokens - 1);
  } else if (mode == "length") {
    drafts.run(Drafts::kTokens, Drafts::kKeys - 1);
  } else if (mode == "kill-late") {
    drafts.start();
    std::this_thread::sleep_for(kMoment);  // its kernel has sent, and waits for the others
    std::raise(SIGKILL);
  } else {
    std::this_thread::sleep_for(kMoment);  // then the others are in mid-exchange
    return false;
  }
  return true;
}

/// The victim does not begin step `step` of a run, or of a backward.
void run_ring(const Communicator& world, const std::string& mode, int step, const Travel& travel) {
  const bool victim = world.rank() == world.size() - 1;
  const auto stumbling = std::make_shared<tests::StumblingTransport>(world, [&] {
    std::fflush(nullptr);
    std::this_thread::sleep_for(kMoment);  // then the others wait for it
    if (mode == "stop") stop();
    std::raise(SIGKILL);
  });
  Ring ring(victim ? Communicator(stumbling) : world, travel);
  for (int turn = 0; turn < 3; ++turn) {
    ring.run();
    if (travel.backward) ring.backward();
  }
  if (travel.backward) ring.run();
  began = Clock::now();
  if (mode != "differ") stumbling->stumble_at(step);
  if (victim && mode == "abort") {
    const InputError error("k.npy is truncated");
    world.abort(error.what());
    throw error;
  }
  if (victim && step == 0 && mode == "stop") stop();
  if (!travel.backward)
    ring.run();
  else if (!victim || mode != "skip")
    ring.backward(victim && mode == "differ" ? DType::bf16 : DType::fp32);
  world.barrier("the end");
}

void run(const Asked& asked) {
  const std::string& mode = asked.mode;
  const Device device = asked.device;
  const bool last = env_text("OMPI_COMM_WORLD_RANK") && env_text("OMPI_COMM_WORLD_SIZE") &&
                    std::stoi(*env_text("OMPI_COMM_WORLD_RANK")) + 1 ==
                        std::stoi(*env_text("OMPI_COMM_WORLD_SIZE"));
  if (mode == "start" && last) stop();
  if (mode == "make") {
    int level = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level);
    if (last) stop();
  }
  if (mode == "single") MPI_Init(nullptr, nullptr);
  std::optional<tests::NoThreads> none;
  if (mode == "crowded" && last) none.emplace();
  Ranks ranks(device);
  if (mode == "crowded-end") none.emplace();
  const bool victim = ranks.world.rank() == ranks.world.size() - 1;
  ranks.exchange("warm up");
  const int size = ranks.world.size();  // of two ranks, or nodes, a ring has one step
  if (asked.exchange == "ring")
    return run_ring(ranks.world, mode, size > 2 ? 2 : 1, {.strategy = "ring-kv", .heads = 1});
  if (asked.exchange == "levels")
    return run_ring(ranks.world, mode, size > 4 ? 2 : 1,
                    {.strategy = "heads+ring-kv", .heads = 2, .per_node = 2});
  if (asked.exchange == "heads")
    return run_ring(ranks.world, mode, 2, {.strategy = "heads", .heads = size});
  if (asked.exchange == "keys")
    return run_ring(ranks.world, mode, 1,
                    {.strategy = "gather-kv", .heads = 2, .dtype = DType::bf16});
  if (asked.exchange == "backward")
    return run_ring(ranks.world, mode, size > 2 ? 2 : 1,
                    {.strategy = "ring-kv", .heads = 1, .backward = true});
  if (asked.exchange == "dq")
    return run_ring(ranks.world, mode, 0,
                    {.strategy = "gather-states",
                     .heads = 1,
                     .backward = true,
                     .replicated = true,
                     .exchange = Exchange::gather});
  std::optional<Drafts> drafts;
  if (!asked.exchange.empty()) {
    drafts.emplace(ranks.world, asked);
    for (int turn = 0; turn < 3; ++turn) drafts->run();
  } else if (mode == "differ") {
    agree(ranks.world, {{"heads", victim ? "16" : "32"}}, "make the layer");
  }
  began = Clock::now();
  if (victim) {
    std::fflush(nullptr);
    if (drafts && misbehave(mode, *drafts)) return ranks.world.barrier("the end");
    if (mode.starts_with("stop")) stop();
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
  if (mode == "kill-late") std::this_thread::sleep_for(3 * kMoment);
  if (drafts)
    drafts->run();
  else if (mode == "stop-ring")
    ranks.ring("ring");
  else
    ranks.exchange("states");
  ranks.world.barrier("the end");
  if (mode == "end" && victim) stop();
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  Asked asked{words.at(0)};
  if (words.size() > 1 && words[1] == "cuda") asked.device = Device::cuda;
  if (words.size() > 2) asked.exchange = words[2];
  asked.graph = words.size() > 3 && words[3] == "graph";
  const int ranks = std::stoi(env_text("OMPI_COMM_WORLD_SIZE").value_or("1"));
  if (asked.device == Device::cuda && gpu_count() < (asked.mode == "share" ? 1 : ranks)) {
    std::printf("Skipped: %d ranks want a GPU each, and there are %d.\n", ranks, gpu_count());
    return 77;
  }
  try {
    run(asked);
    return 0;
  } catch (const Skipped& skipped) {
    std::printf("Skipped: %s\n", skipped.why.c_str());
    return 77;
  } catch (const RankError& error) {
    const std::chrono::duration<double> after = Clock::now() - began;
    std::fprintf(stderr, "SAW rank=%d step=%s kind=%d: %s\n", error.rank(), error.step().c_str(),
                 static_cast<int>(error.kind()), error.what());
    if (began != Clock::time_point{}) std::fprintf(stderr, "AFTER %.1f s\n", after.count());
    return static_cast<int>(error.kind());
  } catch (const Error& error) {
    std::fprintf(stderr, "ERR kind=%d: %s\n", static_cast<int>(error.kind()), error.what());
    return static_cast<int>(error.kind());
  }
}
