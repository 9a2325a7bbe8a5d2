// The stand-in's GPUs as a test handles them: what is alive, and which call fails.
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

/// Calls that no runtime allows: memory freed that a rank has mapped, or that was freed before.
int offences();

/// Frees what tests of failures leave, which in a process that ends nobody does.
void clear();

/// The call of this thread, counted from 1 on and from now, that fails with "out of memory" where
/// nothing else is wrong. 0: none.
void fail_call(int number);

/// The name of the call that was made to fail; empty: none was yet.
std::string failed_call();

/// Handles lead to other memory than the one that they were made for.
void mislead(bool wrongly);

/// What cudaStreamQuery says of every stream.
void keep_streams_busy(bool busy);

}  // namespace longspan::stand_in
