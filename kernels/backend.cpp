// The parts that all backends share.
#include "kernels/backend.hpp"

#include <string>

#include "longspan/error.hpp"

namespace longspan::kernels {

void AttentionKernels::exchange(const ExchangeParams&, Stream) const {
  throw Unsupported(std::string("exchange by peer buffers is not supported on the ") +
                    name(device()));
}

void RowKernels::put_rows(const RowPuts&, Stream) const {
  throw Unsupported("rows are put into other ranks' memory by GPUs alone");
}

void AttentionKernels::queue(const Epilogue& epilogue, Stream stream,
                             const EpilogueBegins& begins) const {
  if (begins && !std::holds_alternative<StateEpilogue>(epilogue)) begins();
  if (const auto* result = std::get_if<MergeParams>(&epilogue)) merge(*result, stream);
  if (const auto* states = std::get_if<ExchangeParams>(&epilogue)) exchange(*states, stream);
}

void attend_context_by_states(const Backend& backend, const ContextParams& p, Stream stream) {
  if (p.key_start != nullptr)
    backend.key_starts({p.fresh.shard, p.fresh.batch.kv_len, 0, p.fresh.batch.size, p.key_start},
                       stream);
  backend.attend(p.cached, stream);
  backend.attend(p.fresh, p.merge, stream);
}

namespace {
[[noreturn]] void refuse_gradients() {
  throw Unsupported("gradients on a GPU: this build computes them on CPUs only");
}
}  // namespace

std::size_t GradientKernels::gradient_scratch(const GradientParams&) const { refuse_gradients(); }
void GradientKernels::row_terms(const RowTermParams&, Stream) const { refuse_gradients(); }
void GradientKernels::sink_gradients(const SinkGradientParams&, Stream) const {
  refuse_gradients();
}
void GradientKernels::attend_gradients(const GradientParams&, Stream, const BetweenTiles&) const {
  refuse_gradients();
}
void GradientKernels::widen_gradients(const WidenGradientsParams&, Stream) const {
  refuse_gradients();
}
void GradientKernels::clear_sums(float*, std::int64_t, Stream) const { refuse_gradients(); }
void GradientKernels::add_sums(float*, const float*, std::int64_t, Stream) const {
  refuse_gradients();
}
void GradientKernels::add_sums(double*, const double*, std::int64_t, Stream) const {
  refuse_gradients();
}
void GradientKernels::add_to_first_columns(const AddColumnsParams&, Stream) const {
  refuse_gradients();
}
void GradientKernels::turn_back_sums(const TurnBackParams&, Stream) const { refuse_gradients(); }
void GradientKernels::turn_back_keys(const TurnBackKeysParams&, Stream) const {
  refuse_gradients();
}
void GradientKernels::store_gradients(const StoreGradientParams&, Stream) const {
  refuse_gradients();
}

}  // namespace longspan::kernels
