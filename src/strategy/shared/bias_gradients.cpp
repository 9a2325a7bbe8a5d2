#include "src/strategy/shared/bias_gradients.hpp"

#include "src/arguments/tensor_checks.hpp"
#include "src/base/at.hpp"
#include "src/strategy/shared/rank_sums.hpp"

namespace longspan {
namespace {

using kernels::GradientSums;

/// The bytes of sums [rows, columns].
std::int64_t bytes_of(const GradientSums& sums) {
  return GradientSums::bytes(sums.rows, 1, sums.dim);
}

}  // namespace

std::int64_t BiasGradients::bytes(const Options& o, int ranks) {
  if (!o.gradients) return 0;
  const auto width = o.limits.max_qq_gradient;
  const std::int64_t sums = GradientSums::bytes(o.limits.max_batch, 1, o.heads) +
                            GradientSums::bytes(width, 1, static_cast<int>(width));
  return ranks == 1 ? sums : 2 * rank_sum_room(sums, ranks);
}

void BiasGradients::lay_out(Parts& memory) {
  if (!options_.gradients) return;
  const std::int64_t all = bytes(options_, comm_.size());
  own_ = memory.take(at(comm_.size() == 1 ? all : all / 2));
  if (comm_.size() > 1) arriving_ = memory.take(at(all / 2));
}

BiasGradients::Sums BiasGradients::sums_of(const GradientArgs& args) const {
  Sums sums;
  const auto take = [&](GradientSums& to, std::int64_t rows, std::int64_t columns) {
    to = {reinterpret_cast<float*>(own_ + sums.bytes), rows, static_cast<int>(columns)};
    sums.bytes += bytes_of(to);
  };
  const Tensor &slopes = args.dslopes, &qq = args.dqq_bias;
  if (slopes) take(sums.slopes, slopes.dims == 2 ? slopes.shape[0] : 1, options_.heads);
  if (qq) take(sums.qq, qq.shape[0], qq.shape[1]);
  return sums;
}

void BiasGradients::begin(Pass& pass, const GradientArgs& args) const {
  const Sums sums = sums_of(args);
  if (sums.bytes == 0) return;
  kernels_.clear_sums(reinterpret_cast<float*>(own_), sums.bytes / 4, pass.run.stream);
  kernels::BiasSums& p = pass.bias_sums;
  p.slopes = sums.slopes.data;
  p.slope_stride = args.dslopes.dims == 2 ? GradientSums::padded(options_.heads) : 0;
  p.qq = sums.qq.data;
  p.qq_stride = GradientSums::padded(sums.qq.dim);
}

void BiasGradients::finish(const Pass& pass, const GradientArgs& args) const {
  const Sums sums = sums_of(args);
  if (sums.bytes == 0) return;
  if (comm_.size() > 1)
    add_up_ranks(own_, arriving_, sums.bytes, RankFold::one_after_another(comm_.size()), kernels_,
                 comm_, pass.run.stream,
                 {"backward, exchange of gradients of biases", "backward, gather of them"});
  for (const auto& [from, to] :
       {std::pair{&sums.slopes, &args.dslopes}, {&sums.qq, &args.dqq_bias}})
    if (*to)
      kernels_.store_gradients({.sums = *from,
                                .count = from->rows,
                                .dtype = to->dtype,
                                .to = kernels::Rows{to->data, to->dims == 2 ? to->stride[0] : 0, 0},
                                .accumulate = args.accumulate,
                                .headers = pass.merge.headers},
                               pass.run.stream);
}

}  // namespace longspan
