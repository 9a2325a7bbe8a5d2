#include "launcher/judge/judged_rows.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "launcher/judge/judge.hpp"
#include "launcher/problem/elements.hpp"

namespace longspan::launcher {
namespace {

/// The factor by which a stored element of a sequence's kv head is multiplied.
double factor_of(const std::vector<float>& scale, int sequence, int kv_head, int kv_heads) {
  if (scale.empty()) return 1.0;
  const auto heads = static_cast<std::size_t>(kv_heads), head = static_cast<std::size_t>(kv_head);
  if (scale.size() == 1) return scale[0];
  return scale[scale.size() == heads ? head : static_cast<std::size_t>(sequence) * heads + head];
}

/// Reads the keys or values of one kv head of one sequence, in order of position.
RowMajor whole_head(const Source& source, const std::vector<float>& scale, int sequence,
                    std::int64_t first, std::int64_t count, int head, int threads) {
  const double factor = factor_of(scale, sequence, head, source.heads);
  RowMajor matrix(count, source.dim);
  parallel_for(count, threads, [&](std::int64_t i) {
    std::vector<float> row(source.dim);  // room for any dtype
    source.read(first + i, std::int64_t{head} * source.dim, source.dim, row.data());
    for (int d = 0; d < source.dim; ++d) matrix(i, d) = factor * load(row.data(), source.dtype, d);
  });
  return matrix;
}

/// The pairs of a kv head and a row that this rank judges, of all in this order.
struct Share {
  std::int64_t begin, end;
  Share(const Communicator& world, const Options& o, std::int64_t rows)
      : begin(o.kv_heads * rows * world.rank() / world.size()),
        end(o.kv_heads * rows * (world.rank() + 1) / world.size()) {}
};

}  // namespace

int heads_at_once(const Options& options, double kv_len) {
  constexpr double kMost = 1 << 30;
  const double columns = options.head_dim + options.of_values();
  return static_cast<int>(
      std::clamp(kMost / (std::max(1.0, kv_len) * 8 * columns), 1.0, 1.0 * options.kv_heads));
}

std::int64_t count_judged(const Communicator& world, const Options& options, std::int64_t rows) {
  const Share share(world, options, rows);
  return (share.end - share.begin) * (options.heads / options.kv_heads);
}

void for_judged_rows(const Communicator& world, const Problem& problem,
                     const std::vector<std::int64_t>& of_q,
                     const std::function<void(const JudgedRow&)>& visit) {
  const Options& o = problem.options;
  const auto rows = std::ssize(of_q);
  const Share share(world, o, rows);
  const auto query_start = problem.query_start();
  const auto key_start = problem.key_start();
  const int group = o.heads / o.kv_heads;

  // A stretch of pairs has one kv head and one sequence, so that its keys are read once.
  struct Stretch {
    int kv_head, sequence;
    std::int64_t begin, end;
  };
  std::vector<Stretch> stretches;
  std::int64_t longest = 0;
  for (std::int64_t at = share.begin; at < share.end;) {
    Stretch s{static_cast<int>(at / rows), 0, at, at};
    while (of_q[at % rows] >= query_start[s.sequence + 1]) ++s.sequence;
    while (s.end < share.end && s.end / rows == s.kv_head &&
           of_q[s.end % rows] < query_start[s.sequence + 1])
      ++s.end;
    longest = std::max<std::int64_t>(longest, problem.kv_lens[s.sequence]);
    at = s.end;
    stretches.push_back(s);
  }

  const auto count = std::ssize(stretches);
  const int all_threads =
      o.threads > 0 ? o.threads : static_cast<int>(std::thread::hardware_concurrency());
  const std::int64_t most = std::min<std::int64_t>(count, all_threads);
  const int at_once = static_cast<int>(std::clamp<std::int64_t>(
      heads_at_once(o, static_cast<double>(longest)), 1, std::max<std::int64_t>(1, most)));
  const int threads = std::max(1, all_threads / at_once);
  parallel_for(count, at_once, [&](std::int64_t stretch) {
    const Stretch& s = stretches[stretch];
    const std::int64_t first_key = key_start[s.sequence], kv_len = problem.kv_lens[s.sequence];
    const RowMajor keys =
        whole_head(problem.k, problem.k_scale, s.sequence, first_key, kv_len, s.kv_head, threads);
    const RowMajor values =
        whole_head(problem.v, problem.v_scale, s.sequence, first_key, kv_len, s.kv_head, threads);
    parallel_for((s.end - s.begin) * group, threads, [&](std::int64_t p) {
      const auto i = static_cast<std::size_t>((s.begin + p / group) % rows);
      visit({.number = (s.begin - share.begin) * group + p,
             .i = i,
             .at = of_q[i],
             .sequence = s.sequence,
             .t = of_q[i] - query_start[s.sequence],
             .head = static_cast<int>(std::int64_t{s.kv_head} * group + p % group),
             .keys = keys,
             .values = values});
    });
  });
}

Eigen::VectorXd head_of(const Source& source, std::int64_t row, int head) {
  std::vector<float> elements(source.dim);  // room for any dtype
  source.read(row, std::int64_t{head} * source.dim, source.dim, elements.data());
  Eigen::VectorXd values(source.dim);
  for (int d = 0; d < source.dim; ++d) values[d] = load(elements.data(), source.dtype, d);
  return values;
}

Eigen::VectorXd query_row(const Problem& problem, std::int64_t at, int b, std::int64_t t,
                          int head) {
  const Options& o = problem.options;
  Eigen::VectorXd q = factor_of(problem.q_scale, b, head / (o.heads / o.kv_heads), o.kv_heads) *
                      head_of(problem.q, at, head);
  if (o.rope.dim == 0) return q;
  rotate_exactly(q, o.rope, problem.position(b, t));
  for (double& element : q) element = rounded(problem.q.dtype, static_cast<float>(element));
  return q;
}

double score_unit(const Options& o) {
  if (o.dtypes.fp8_products) return 0x1p-13;
  if (o.rope.dim == 0 || o.dtypes.compute == DType::fp32) return 0x1p-23;
  return o.dtypes.compute == DType::fp16 ? 0x1p-10 : 0x1p-7;
}

double distance(double a, double b) {
  if (a == b || (std::isnan(a) && std::isnan(b))) return 0;
  const double d = std::abs(a - b);
  return std::isnan(d) ? std::numeric_limits<double>::infinity() : d;
}

std::vector<std::vector<double>> gather_numbers(const Communicator& world,
                                                const std::vector<double>& mine, const char* step) {
  std::vector<std::vector<double>> all;
  for (const std::string& bytes : world.gather(
           std::string(reinterpret_cast<const char*>(mine.data()), mine.size() * 8), step)) {
    all.emplace_back(bytes.size() / 8);
    std::memcpy(all.back().data(), bytes.data(), bytes.size());
  }
  return all;
}

}  // namespace longspan::launcher
