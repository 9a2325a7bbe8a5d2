// The longspan command: it parses, meets the other ranks, agrees, works, and exits with the number
// of the error.
//
// It has two ways to end. The orderly way is for outcomes that every rank knows: rank 0 prints and
// MPI is finalised. The other is at once, for an error that only this rank knows: it prints why,
// tells the others, and exits without finalising, so that it waits for no dead or stopped rank.
#include <fmt/format.h>
#include <sys/time.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>

#include "launcher/bench/decode_bench.hpp"
#include "launcher/bench/scale_bench.hpp"
#include "launcher/command/info.hpp"
#include "launcher/command/reshard.hpp"
#include "launcher/command/run.hpp"
#include "launcher/command/verify.hpp"
#include "launcher/io/output_file.hpp"
#include "launcher/io/speech.hpp"
#include "launcher/options/options.hpp"
#include "launcher/plan/calibrate.hpp"
#include "launcher/plan/plan.hpp"
#include "launcher/problem/world.hpp"
#include "longspan/communicator.hpp"
#include "longspan/error.hpp"

namespace longspan::launcher {
namespace {

/// Checks that the command line is the same on every rank; throws a SharedError otherwise.
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
    case Action::bench_scale:
      return bench_scale(world, line);
    case Action::calibrate:
      return calibrate(world, line);
    case Action::plan:
      return plan(world, line);
    case Action::reshard:
      return reshard(world, line);
    case Action::list_strategies:
      text = strategies_text();
      break;
    case Action::info:
      text = line.features  ? features_text(line.json)
             : line.kernels ? kernels_text(line.json)
             : line.options ? options_text(line.json)
                            : info_text(world.describe(), line.json);
      break;
    case Action::env:
      text = environment_text(line.json);
      break;
    case Action::say:
      break;
  }
  tell(world, [&] { return text; });
  return 0;
}

/// Ends without waiting for any other rank, and removes unfinished files. It does only what a
/// signal handler may do.
[[noreturn]] void leave_at_once(int status) {
  remove_unfinished();
  std::_Exit(status);
}

/// Ends the process if the orderly end (MPI_Finalize waits for every rank) outlasts the deadline.
/// It uses a signal, since a thread may not start where memory is short.
void limit_the_end(std::chrono::milliseconds deadline) {
  std::fflush(nullptr);
  std::signal(SIGALRM, [](int) { std::_Exit(static_cast<int>(ErrorKind::timeout)); });
  itimerval limit{};
  limit.it_value.tv_sec = deadline.count() / 1000;
  limit.it_value.tv_usec = deadline.count() % 1000 * 1000;
  setitimer(ITIMER_REAL, &limit, nullptr);
}

/// Removes a file that is being written when a signal ends the process.
void clean_up_on_signals() {
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    if (std::signal(number, SIG_IGN) == SIG_IGN) continue;  // stays ignored, for nohup
    std::signal(number, [](int received) {
      remove_unfinished();
      std::signal(received, SIG_DFL);
      std::raise(received);
    });
  }
}

/// Ends for an error that only this rank knows.
[[noreturn]] void fail(const Communicator* world, ErrorKind kind, const char* what) {
  std::fflush(stdout);
  complain(
      fmt::format("longspan: {}{}", world ? fmt::format("rank {}: ", world->rank()) : "", what));
  if (world) world->abort(what);
  leave_at_once(static_cast<int>(kind));
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
    if (world.rank() == 0) complain(fmt::format("longspan: {}", error.what()));
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
  settle_streams();
  clean_up_on_signals();
  return or_fail(nullptr, [&] {
    const CommandLine line = parse(argc, argv);
    return conduct(control_world(line.world), line);
  });
}
