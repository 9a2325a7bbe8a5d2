// Calls of the runtime that fail on demand, as if there were no memory.
#pragma once

#include <string>

namespace longspan::simulated {

/// The `number`-th call of this name from now on fails, once; "any" counts all calls except those
/// that only report errors. A launch is called cudaLaunchKernelExC. 0: none fails.
/// LONGSPAN_SIMULATED_FAIL_CALL=name:number requests the same from the start of the process.
void fail_call(const std::string& name, int number);

/// The call that has been made to fail; empty: none.
std::string failed_call();

/// Whether this call, which begins, must fail.
bool is_made_to_fail(const char* call);

}  // namespace longspan::simulated
