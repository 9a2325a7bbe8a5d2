// The Python names of the arguments that the library names in its errors.
#pragma once

#include <cstdint>
#include <string>

namespace longspan::python {

/// Whose names an error uses: functions name the same thing differently.
enum class Function : std::uint8_t {
  any,
  attend,
  layer,  // longspan.Attention
  merge_attn_states,
  merge_state,
  merge_states,
  cross_rank_merge,
  paged,  // segmented_attention, context_attention, reduce_segments, append_kv
  reshard,
};

/// "kv_len[1] is -3" -> "cache_seqlens[1] is -3". Text in quotes is a caller's own word and stays,
/// except the name of what differs between ranks.
std::string with_python_names(const std::string& message, Function function = Function::any);

}  // namespace longspan::python
