// The host's questions about a kernel are answered by the code that was compiled, not by the GPU:
// on a GPU of 9.0 that ran code of 8.0, decode waited for ever for bytes that were never requested.
#include "kernels/cuda/common/code.hpp"

#include <gtest/gtest.h>

namespace longspan::kernels::cuda {
namespace {

struct Case {
  int gpu;           // compute capability, 10 x major + minor
  int compiled_for;  // in the form of cudaFuncAttributes::ptxVersion
  bool sm90_code;    // uses TMA, waits for the kernels before it
  bool hoppers;      // where the build has code for sm_90a
};

constexpr Case kCases[] = {
    {80, 80, false, false},  {86, 80, false, false},  {89, 80, false, false},
    {90, 90, true, true},    {90, 80, false, false},  // only PTX of 8.0, or CUDA_FORCE_PTX_JIT
    {90, 89, false, false},  {100, 100, true, false}, {100, 90, true, false},
    {100, 80, false, false}, {103, 100, true, false}, {120, 80, false, false},
    {120, 100, true, false}, {120, 120, true, false},
};

TEST(Code, FollowsWhatItWasCompiledFor) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.gpu);
    SCOPED_TRACE(c.compiled_for);
    EXPECT_EQ(is_code_of_sm90(c.compiled_for), c.sm90_code);
    EXPECT_EQ(is_hoppers_code(true, c.gpu / 10, c.gpu % 10, c.compiled_for), c.hoppers);
    EXPECT_FALSE(is_hoppers_code(false, c.gpu / 10, c.gpu % 10, c.compiled_for));
  }
}

}  // namespace
}  // namespace longspan::kernels::cuda
