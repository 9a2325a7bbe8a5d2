// Forward and backward of one rank of a layer on CPUs, which bench/train_vs_torch.py starts. Rows
// and keys are sharded by zigzag over the ranks of the launcher; without one there is one rank.
// Rank 0 prints, as JSON, the milliseconds of forward and of backward in each turn, the greatest of
// the ranks.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "launcher/problem/random.hpp"
#include "longspan/longspan.hpp"

namespace {

using namespace longspan;

struct Shape {
  std::int64_t tokens = 4096;
  int heads = 8, kv_heads = 8, dim = 64;
  std::string dtype = "fp32", strategy = "auto";
  bool causal = false;
  int threads = 1, turns = 5;
};

/// One rank's tensors of a run, and of its backward.
class Step {
 public:
  Step(const Communicator& world, const Shape& s)
      : type_(s.dtype == "bf16" ? bf16 : fp32), layer_(world, options(s, type_)) {
    const std::int64_t own = layer_.shard(s.tokens).local_len(s.tokens);
    const auto make = [&](std::uint32_t number, std::int64_t heads) {
      const std::int64_t count = own * heads * s.dim;
      memory_.emplace_back(static_cast<std::size_t>(count) * size_of(type_));
      launcher::RandomTensor{7, number, launcher::Distribution::normal}.store(memory_.back().data(),
                                                                              type_, 0, count);
      return Tensor(memory_.back().data(), type_, {own, heads, s.dim});
    };
    memory_.reserve(8);
    lse_.resize(static_cast<std::size_t>(own * s.heads));
    AttentionArgs& run = args_.run;
    run.q = make(0, s.heads);
    run.k = make(1, s.kv_heads);
    run.v = make(2, s.kv_heads);
    run.out = make(3, s.heads);
    run.lse = Lse::tokens_heads(Tensor(lse_.data(), {own, s.heads}));
    run.total_keys = run.total_tokens = s.tokens;
    args_.dout = make(4, s.heads);
    args_.dq = make(5, s.heads);
    args_.dk = make(6, s.kv_heads);
    args_.dv = make(7, s.kv_heads);
  }

  void forward() { layer_.run(args_.run); }
  void backward() { layer_.backward(args_); }

 private:
  static Options options(const Shape& s, DType type) {
    Options o{.heads = s.heads, .kv_heads = s.kv_heads, .head_dim = s.dim};
    o.dtypes.compute = type;
    o.mask.causal = s.causal;
    o.limits = {.max_tokens = s.tokens, .max_kv_len = s.tokens};
    o.keys = {Layout::zigzag};
    o.queries = Sharding{Layout::zigzag};
    o.gradients = true;
    o.strategy = s.strategy;
    o.threads = s.threads;
    return o;
  }

  DType type_;
  Attention layer_;
  std::vector<std::vector<std::byte>> memory_;
  std::vector<float> lse_;
  GradientArgs args_;
};

}  // namespace

int main(int argc, char** argv) try {
  Shape s;
  CLI::App app("Forward and backward of one rank, on CPUs");
  app.add_option("--tokens", s.tokens, "of the sequence")->check(CLI::PositiveNumber);
  app.add_option("--heads", s.heads, "query heads")->check(CLI::PositiveNumber);
  app.add_option("--kv-heads", s.kv_heads, "heads of keys")->check(CLI::PositiveNumber);
  app.add_option("--dim", s.dim, "of a head")->check(CLI::PositiveNumber);
  app.add_option("--dtype", s.dtype, "fp32 or bf16")->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--strategy", s.strategy, "how data travels");
  app.add_flag("--causal", s.causal, "a causal mask");
  app.add_option("--threads", s.threads, "of a rank")->check(CLI::PositiveNumber);
  app.add_option("--turns", s.turns, "that are timed, after one to warm up")
      ->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);

  const Communicator world = from_environment();
  Step step(world, s);
  std::string mine;
  for (int turn = -1; turn < s.turns; ++turn) {
    using Clock = std::chrono::steady_clock;
    world.gather("", "start of a turn");
    const auto begin = Clock::now();
    step.forward();
    const auto middle = Clock::now();
    step.backward();
    const std::chrono::duration<double, std::milli> spent[] = {middle - begin,
                                                               Clock::now() - middle};
    if (turn < 0) continue;
    for (const auto& part : spent) {
      const double ms = part.count();
      mine.append(reinterpret_cast<const char*>(&ms), sizeof ms);
    }
  }
  std::vector<double> most(2 * static_cast<std::size_t>(s.turns));
  for (const std::string& bytes : world.gather(mine, "the times")) {
    std::vector<double> times(most.size());
    std::memcpy(times.data(), bytes.data(), bytes.size());
    for (std::size_t i = 0; i < most.size(); ++i) most[i] = std::max(most[i], times[i]);
  }
  if (world.rank() != 0) return 0;
  std::vector<double> forward, backward;
  for (std::size_t i = 0; i < most.size(); i += 2) {
    forward.push_back(most[i]);
    backward.push_back(most[i + 1]);
  }
  std::cout << nlohmann::json{{"forward_ms", forward}, {"backward_ms", backward}} << '\n';
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench_train: %s\n", error.what());
  return 1;
}
