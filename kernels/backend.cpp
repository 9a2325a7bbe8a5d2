// What a backend has no kernel for, it refuses by name.
#include "kernels/backend.hpp"

#include "longspan/error.hpp"

namespace longspan::kernels {
namespace {

[[noreturn]] void refuse(const Backend& backend, const char* what) {
  throw Unsupported(std::string(what) + " is not supported on the " + name(backend.device()));
}

}  // namespace

void Backend::exchange(const ExchangeParams&, Stream) const {
  refuse(*this, "exchange by windows");
}
void Backend::merge_outputs(const MergeOutputsParams&, Stream) const {
  refuse(*this, "merge of finished outputs");
}
void Backend::export_segments(const ExportSegmentsParams&, Stream) const {
  refuse(*this, "hand-out of segments");
}
void Backend::reduce_segments(const ReduceSegmentsParams&, Stream) const {
  refuse(*this, "reduce_segments");
}
void Backend::append(const AppendParams&, Stream) const { refuse(*this, "append"); }
void Backend::cut_context(const ContextCutParams&, Stream) const { refuse(*this, "cut_context"); }
void Backend::check_arrays(const CheckParams&, Stream) const { refuse(*this, "check_arrays"); }

}  // namespace longspan::kernels
