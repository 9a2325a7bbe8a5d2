// NVTX ranges around the phases, in longspan's own domain; empty in a build without NVTX.
#pragma once

#if defined(LONGSPAN_NVTX)
#include <nvtx3/nvtx3.hpp>
#endif

namespace longspan::trace {

#if defined(LONGSPAN_NVTX)
struct Domain {
  static constexpr char const* name{"longspan"};
};
using Range = nvtx3::scoped_range_in<Domain>;
#else
struct Range {
  explicit Range(const char*) {}
};
#endif

}  // namespace longspan::trace
