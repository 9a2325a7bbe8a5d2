// A test's access to the stand-in's GPUs: what is alive, and which call fails.
#pragma once

#include <string>

namespace longspan::stand_in {

struct Alive {
  int memory = 0;    // pieces of the GPUs'
  int host = 0;      // pieces of the host's that GPUs see
  int mappings = 0;  // of memory that another rank shares
  int events = 0;
  int streams = 0;
  bool operator==(const Alive&) const = default;
};

Alive alive();

/// Counts forbidden calls: memory freed while a rank has it mapped, or freed twice.
int offences();

/// Frees what tests of failures leave, as the end of a process would.
void clear();

/// The call of this thread, counted from 1 and from now, that fails with "out of memory" where
/// nothing else is wrong. 0: none.
void fail_call(int number);

/// The name of the call that was made to fail; empty: none so far.
std::string failed_call();

/// Handles open other memory than the one that they were made for.
void mislead(bool wrongly);

/// The result of cudaStreamQuery for every stream.
void keep_streams_busy(bool busy);

}  // namespace longspan::stand_in
