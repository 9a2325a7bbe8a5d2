#include "launcher/command/verify.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "launcher/io/progress.hpp"
#include "launcher/judge/judge.hpp"
#include "launcher/judge/report.hpp"
#include "launcher/problem/families.hpp"
#include "launcher/problem/problem.hpp"
#include "launcher/problem/world.hpp"

namespace longspan::launcher {
namespace {

/// Names the parts that a serving batch adds, where it has them.
std::string features(const Problem& p) {
  std::string text;
  if (p.cache) text += fmt::format(" page {}{}", p.cache.page, p.cache.x_packed ? " x-packed" : "");
  if (!p.slopes.empty()) text += fmt::format(" ALiBi {}", name(p.options.score.alibi));
  if (!p.qq_bias.empty()) text += " qq_bias";
  if (!p.causal.empty()) text += fmt::format(" causal of each {}", p.causal);
  if (!p.documents.empty()) text += fmt::format(" documents {}", p.documents);
  if (p.options.mask.chunk > 0)
    text += fmt::format(" chunk {} lookback {}", p.options.mask.chunk, p.options.mask.lookback);
  if (p.options.mask.prefix > 0)
    text += fmt::format(" prefix {} {}", p.options.mask.prefix, p.prefix);
  if (!p.bidirectional.empty())
    text += fmt::format(" bidirectional {}{}", p.bidirectional,
                        p.options.mask.clamp_ranges ? " clamped" : "");
  if (!p.left_padding.empty()) text += fmt::format(" left padding {}", p.left_padding);
  if (!p.indices.empty())
    text += fmt::format(" {} lists of {} indices{} by {}", p.lists, p.index_columns(),
                        p.index_len.empty() ? "" : " with lengths", p.options.strategy);
  if (p.stored_k) text += fmt::format(" kv {}", name(p.options.dtypes.of_kv()));
  if (!p.q_scale.empty()) text += fmt::format(" q {}", name(p.q.dtype));
  if (!p.k_scale.empty())
    text += fmt::format(" kv {} {} scales", name(p.k.dtype), p.k_scale.size());
  if (p.options.mask.alignment != Alignment::lower_right)
    text += fmt::format(" {}", name(p.options.mask.alignment));
  if (p.options.dropout.p > 0)
    text += fmt::format(" dropout {} seed {} sequences {} first head {}", p.options.dropout.p,
                        p.dropout_seed, p.dropout_sequences, p.options.dropout.first_head);
  if (p.out_scale != 0) text += fmt::format(" out {}", name(p.out_dtype()));
  if (p.goes_back())
    text += fmt::format(" gradients in {} by {}{}", name(p.gradient_dtype()), p.options.strategy,
                        p.dlse ? ", with dlse" : "");
  return text;
}

std::string describe(const Problem& p) {
  const Options& o = p.options;
  std::string numbers = rope_text(o.rope);
  for (const auto& [name, value] : score_numbers(o.score))
    numbers += fmt::format(" {} {}", name, value);
  return fmt::format(
             "{} heads {}/{} dims {}/{} q {} kv {} keys {}:{}{} causal {} window {} right {}{}{}{}",
             name(o.dtypes.compute), o.heads, o.kv_heads, o.head_dim, p.value_dim(), p.q_lens,
             p.kv_lens, name(p.keys.layout), p.keys.block,
             p.queries ? fmt::format(" queries {}:{}", name(p.queries->layout), p.queries->block)
                       : "",
             o.mask.causal, o.mask.window, o.mask.right, numbers, p.sinks.empty() ? "" : " sinks",
             p.capacity ? fmt::format(" capacity {}", p.capacity) : "") +
         features(p);
}

/// The results of a family after its problems have run.
struct Verdict {
  int problems = 0, failed = 0;
  double fp32 = 0;   // largest relative error by norm of fp32 problems
  double ratio = 0;  // largest error / plain attention's, of 16-bit problems
  double max_error = 0, lse_error = 0;
  std::int64_t wrong = 0;
  int peer_buffers = 0;  // problems whose states travelled through peer buffers
  std::string first_failure;

  void add(const Problem& problem, const Judgement& j, bool same_bits) {
    ++problems;
    max_error = std::max(max_error, j.max_error);
    lse_error = std::max(lse_error, j.lse_error);
    wrong += j.wrong;
    for (const GradientErrors& of : j.gradients) max_error = std::max(max_error, of.max_error);
    if (problem.options.dtypes.compute == DType::fp32)
      fp32 = std::max(fp32, j.relative_error);
    else if (j.max_error > 0)
      ratio = std::max(ratio, j.max_error / j.plain_error);
    if (j.right && same_bits) return;
    if (failed++ > 0) return;
    first_failure = same_bits ? complaint(j) : std::string("other bits than one rank gives");
    first_failure += ": " + describe(problem);
  }
};

/// Computes the digest of one rank alone.
std::uint64_t digest_alone(Device device, Problem problem) {
  const Communicator alone = self(device);
  problem.queries.reset();
  Trial trial(alone, problem);
  trial.run();
  return digest(alone, problem, trial.answer());
}

/// The exchange that was asked for, as far as the problem can have it: a rank merges sharded
/// queries itself, so their states are always gathered.
Exchange exchange_for(const Problem& problem, Exchange asked) {
  return problem.queries && asked != Exchange::gather ? Exchange::automatic : asked;
}

Verdict examine(const Communicator& world, const Family& family, const WorldOptions& options,
                const char* name, Progress& progress) {
  constexpr std::int64_t kRows = 24;
  Verdict verdict;
  for (Problem problem : family.problems) {
    progress.count(name, verdict.problems, static_cast<std::int64_t>(family.problems.size()));
    problem.options.exchange = exchange_for(problem, options.exchange);
    std::optional<Trial> trial;
    together(world, "making of the layer", [&] { trial.emplace(world, problem); });
    verdict.peer_buffers += trial->layer().exchange().has_peer_buffers();
    trial->run();
    const Answer answer = trial->answer();
    const std::uint64_t bits = digest(world, problem, answer);
    const Judgement j = judge(world, problem, answer, sample_rows(problem, kRows, options.seed),
                              sample_keys(problem, kRows, options.seed));
    bool same_bits = true;
    if (family.same_bits) {
      const bool mine = digest_alone(world.device(), problem) == bits;
      for (const std::string& theirs : world.gather(mine ? "same" : "other", "comparison of bits"))
        same_bits = same_bits && theirs == "same";
    }
    verdict.add(problem, j, same_bits);
  }
  return verdict;
}

std::string row(const char* name, const Family& family, const Verdict& v) {
  if (v.problems == 0)
    return fmt::format(" {:<15}{:>9}{:>12}{:>14}{:>12}{:>12}{:>9}  {}\n", name, 0, "-", "-", "-",
                       "-", "-", family.why_empty);
  return fmt::format(" {:<15}{:>9}{:>12.1e}{:>14.2f}{:>12.1e}{:>12.1e}{:>9}  {}\n", name,
                     v.problems, v.fp32, v.ratio, v.max_error, v.lse_error, v.wrong,
                     v.failed ? fmt::format("FAIL ({} problems)", v.failed) : "pass");
}

}  // namespace

int verify(const Communicator& control, const CommandLine& line) {
  const Communicator world = world_for(control, line.world);
  tell(world, [&] {
    return title(world) +
           fmt::format(
               "# seed {} | fp32: relative error by norm, bound 2e-6 | 16 bits: largest "
               "error over plain attention's, bound 2 | more where large scores amplify "
               "rounding\n#{:<15}{:>9}{:>12}{:>14}{:>12}{:>12}{:>9}\n",
               line.world.seed, " family", "problems", "fp32 rel", "16-bit/plain", "max|err|",
               "lse err", "#wrong");
  });

  Verdict total;
  std::string failures;
  Progress progress(world.rank() == 0);
  const std::vector<std::string>& asked = line.verify.families;
  for (const FamilyMaker& maker : family_makers()) {
    if (!asked.empty() && std::find(asked.begin(), asked.end(), maker.name) == asked.end())
      continue;
    const Family family = maker.make({world.size(), line.verify.size, line.world.seed,
                                      line.world.threads, world.device() == Device::cuda});
    const Verdict v = examine(world, family, line.world, maker.name, progress);
    progress.clear();
    total.problems += v.problems;
    total.peer_buffers += v.peer_buffers;
    total.failed += v.failed;
    if (!v.first_failure.empty())
      failures += fmt::format("# {}: {}\n", maker.name, v.first_failure);
    tell(world, [&] { return row(maker.name, family, v); });
  }
  tell(world, [&] {
    std::string text;
    if (world.size() > 1 && world.device() == Device::cuda)
      text = fmt::format("# states travelled through peer buffers in {} of {} problems\n",
                         total.peer_buffers, total.problems);
    return text + failures +
           fmt::format("# {} of {} problems passed\n", total.problems - total.failed,
                       total.problems);
  });
  if (total.failed > 0)
    throw SharedError(ErrorKind::wrong_result, fmt::format("verify: {} of {} problems failed",
                                                           total.failed, total.problems));
  return 0;
}

}  // namespace longspan::launcher
