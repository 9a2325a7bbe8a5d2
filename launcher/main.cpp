// The longspan command: parse, meet the other ranks, agree, do, and end with the error's number.
//
// Two ways to end. In good order, when every rank knows the outcome: rank 0 speaks and MPI is
// finalised. At once, when only this rank knows: it says why, tells the others, and leaves without
// finalising, so that no dead or stopped rank is waited for.
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>
#include <thread>

#include "launcher/decode_bench.hpp"
#include "launcher/info.hpp"
#include "launcher/options.hpp"
#include "launcher/run.hpp"
#include "launcher/verify.hpp"
#include "launcher/world.hpp"
#include "longspan/communicator.hpp"
#include "longspan/error.hpp"

namespace longspan::launcher {
namespace {

/// The same command line on every rank, or a SharedError.
void settle(const Communicator& world, const CommandLine& line) {
  together(world, "reading of the command line", [&] {
    if (!line.error.empty()) throw UsageError(line.error);
  });
  together(world, "comparison of the command lines", [&] {
    agree(world, {{"command", line.command}}, "comparison of the commands");
    agree(world, line.given, "comparison of the arguments");
  });
}

int perform(const Communicator& world, const CommandLine& line) {
  using Action = CommandLine::Action;
  settle(world, line);
  std::string text = line.text;
  switch (line.action) {
    case Action::run:
      return run(world, line);
    case Action::verify:
      return verify(world, line);
    case Action::bench_decode:
      return bench_decode(world, line);
    case Action::list_strategies:
      text = strategies_text();
      break;
    case Action::info:
      text = line.features ? features_text(line.json) : info_text(world.describe(), line.json);
      break;
    case Action::env:
      text = environment_text(line.json);
      break;
    case Action::say:
      break;
  }
  if (world.rank() == 0) fmt::print("{}", text);
  return 0;
}

[[noreturn]] void leave_at_once(ErrorKind kind) {
  std::fflush(stdout);
  std::fflush(stderr);
  std::_Exit(static_cast<int>(kind));
}

/// Ends the process if the orderly end (MPI_Finalize waits for every rank) outlasts the deadline.
void limit_the_end(std::chrono::milliseconds deadline) {
  std::thread([deadline] {
    std::this_thread::sleep_for(deadline);
    leave_at_once(ErrorKind::timeout);
  }).detach();
}

/// For what only this rank knows.
[[noreturn]] void fail(const Communicator* world, ErrorKind kind, const char* what) {
  std::fflush(stdout);
  fmt::print(stderr, "longspan: {}{}\n",
             world ? fmt::format("rank {}: ", world->rank()) : std::string(), what);
  if (world) world->abort(what);
  leave_at_once(kind);
}

/// Runs `work`; an error that is not shared ends the process.
template <class Work>
auto or_fail(const Communicator* world, const Work& work) {
  try {
    return work();
  } catch (const SharedError&) {
    throw;
  } catch (const Error& error) {
    fail(world, error.kind(), error.what());
  } catch (const std::bad_alloc&) {
    fail(world, ErrorKind::backend, "not enough memory");
  } catch (const std::exception& error) {
    fail(world, ErrorKind::internal, error.what());
  }
}

int conduct(const Communicator& world, const CommandLine& line) {
  int status = 0;
  try {
    status = or_fail(&world, [&] { return perform(world, line); });
  } catch (const SharedError& error) {
    std::fflush(stdout);
    if (world.rank() == 0) fmt::print(stderr, "longspan: {}\n", error.what());
    status = static_cast<int>(error.kind());
  }
  or_fail(&world, [&] { world.barrier("the end"); });
  limit_the_end(world.deadline());
  return status;
}

}  // namespace
}  // namespace longspan::launcher

int main(int argc, char** argv) {
  using namespace longspan::launcher;
  const CommandLine line = parse(argc, argv);
  const longspan::Communicator world = or_fail(nullptr, [&] { return control_world(line.world); });
  return conduct(world, line);
}
