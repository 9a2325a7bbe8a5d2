#include "src/strategy/shared/partial_dout.hpp"

#include "src/arguments/tensor_checks.hpp"
#include "src/base/at.hpp"
#include "src/strategy/shared/rank_sums.hpp"

namespace longspan {
namespace {

/// The bytes of dout and dlse of some rows, in fp32.
std::int64_t row_bytes(const Options& o, std::int64_t rows) {
  return rows * o.heads * (o.of_values() + 1) * 4;
}

}  // namespace

std::int64_t PartialDout::bytes(const Options& o, int ranks) {
  if (!are_partial(o, ranks)) return 0;
  return 2 * rank_sum_room(row_bytes(o, o.limits.max_tokens), ranks);
}

void PartialDout::lay_out(Parts& memory) {
  if (!*this) return;
  for (std::byte** part : {&own_, &arriving_})
    *part = memory.take(at(bytes(options_, comm_.size()) / 2));
}

GradientArgs PartialDout::add_up(Pass& pass, GradientArgs args) const {
  const std::int64_t rows = count_rows(args.run.q);
  const int heads = options_.heads, dim = options_.of_values();
  auto* const dout = reinterpret_cast<float*>(own_);
  float* const dlse = dout + rows * heads * dim;
  pass.write_own_digest(kernels_);
  kernels_.widen_gradients({.dtype = args.dout.dtype,
                            .tokens = rows,
                            .heads = heads,
                            .value_dim = dim,
                            .dout = token_rows_of(args.dout),
                            .dlse = args.dlse ? token_lse_of(args.dlse) : kernels::TokenLse(),
                            .to = dout,
                            .to_lse = dlse},
                           pass.run.stream);
  add_up_ranks(own_, arriving_, row_bytes(options_, rows),
               RankFold::one_after_another(comm_.size()), kernels_, comm_, pass.run.stream,
               {"backward, exchange of partial dout", "backward, gather of dout"}, pass.digests);
  if (kernels_.device() == Device::host) pass.digests = nullptr;  // they are compared
  const Device device = args.dout.device;
  args.dout = Tensor(dout, {rows, heads, dim});
  args.dlse = Lse::tokens_heads(Tensor(dlse, {rows, heads}));
  args.dout.device = args.dlse.tensor.device = device;
  return args;
}

}  // namespace longspan
