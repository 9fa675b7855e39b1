// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/launcher.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <thread>

#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/core/open_files.h"
#include "lockstep/core/require.h"
#include "lockstep/launch/local_ranks.h"
#include "lockstep/launch/processes/affinity.h"
#include "lockstep/launch/recovery_memory.h"
#include "lockstep/launch/rendezvous/network_interface.h"
#include "lockstep/launch/rendezvous/secret.h"
#include "lockstep/launch/rendezvous/socket.h"
#include "lockstep/launch/restart_policy.h"

namespace lockstep::launch {
namespace {

constexpr int kMaxLocalRanks = 4096;
constexpr int kMaxNodes = 65'536;

// Where all nodes are those of one step of Slurm, its number tells it from others of the job that
// have the same secret.
std::string step_of_slurm(int nodes) {
  const auto variable = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  if (nodes == 1 || variable("SLURM_STEP_NUM_NODES") != std::to_string(nodes)) return {};
  return format("slurm {}.{}", variable("SLURM_JOB_ID"), variable("SLURM_STEP_ID"));
}

std::string choose_token(const LaunchOptions& options) {
  const std::string secret =
      options.token_file.empty() ? secret_from_environment() : token_from_file(options.token_file);
  return secret.empty() ? make_token() : token_for_job(secret, step_of_slurm(options.nodes));
}

// So that a folder that cannot be written is known before anything runs. Logs of an earlier job in
// the same folder stay: this one's attempts follow them.
void prepare_logs(LaunchOptions& options) {
  if (options.log_dir.empty()) return;
  const int end = options.first_rank() + options.ranks;
  for (int rank = options.first_rank(); rank < end; ++rank)
    options.first_attempt = std::max(options.first_attempt, free_attempt(options.log_dir, rank));
  for (int rank = options.first_rank(); rank < end; ++rank) {
    open_log(options.log_dir, options.first_attempt, rank, Console::Stream::out);
    open_log(options.log_dir, options.first_attempt, rank, Console::Stream::err);
  }
}

// "rank 2", "ranks 1, 2": those of these places that are not used any more.
std::string ranks_without(const World& world, const std::vector<int>& lost, const World& before) {
  std::vector<int> ranks;
  const auto find = [](const World& in, int place) {
    return std::find(in.places.begin(), in.places.end(), place);
  };
  for (const int place : lost) {
    if (find(world, place) == world.places.end())
      ranks.push_back(static_cast<int>(find(before, place) - before.places.begin()));
  }
  return ranks.empty() ? "" : format("rank{} {}", ranks.size() > 1 ? "s" : "", join(ranks));
}

// What is started, where `all` ranks could be.
std::string describe(const World& world, const World& before, int all, const std::string& restart) {
  const std::string layout = world.layout.empty() ? "" : ": " + world.layout;
  const std::string why = restart.empty() ? "" : format(" ({})", restart);
  if (world.size == all && before.size == all)
    return format("starting all {} ranks again{}", all, why);
  const std::string lost = world.lost.empty() ? "" : ", without " + world.lost;
  const std::string more =
      world.grows_at ? format("; more are tried in {:.0f} s", -seconds_since(*world.grows_at)) : "";
  return format("starting {} of {} ranks, where {} were{}{}{}{}", world.size, all, before.size,
                lost, why, layout, more);
}

// A stop signal ends the job, but for ranks whose last steps are in memory only: they are started,
// and told.
void pause(const Surroundings& around, milliseconds wait) {
  if (wait.count() == 0) return;
  try {
    around.signals.pause(wait);
  } catch (const Interrupted& interrupted) {
    if (!around.link.alone() || !holds_copies(around.facts.recovery_fd)) throw;
    around.link.tell_stop(interrupted.signal);
  }
}

Outcome run_generations(const Surroundings& around) {
  const LaunchOptions& options = around.options;
  RestartPolicy policy(options.max_restarts);
  Places places(options.rank_bounds(), options.grow_after, options.sizes);
  World world = around.link.begin(0, places.next(Clock::now()));
  while (true) {
    LocalRanks ranks(around, world);
    Outcome outcome = ranks.run();
    const RestartPolicy::Decision decision = around.link.agree(policy, outcome);
    if (!decision.restart) {
      if (!decision.text.empty()) around.console.message(decision.text);
      if (decision.code != 0) outcome.code = decision.code;
      return outcome;
    }
    if (!outcome.text.empty()) around.console.message(outcome.text);
    const std::vector<int> lost = ranks.lost_places();
    if (options.rank_bounds().is_elastic()) places.fail(lost, Clock::now());
    pause(around, decision.wait);
    const World before = world;
    world = around.link.begin(before.generation + 1, places.next(Clock::now()));
    if (options.rank_bounds().is_elastic()) world.lost = ranks_without(world, lost, before);
    if (world.size != before.size)
      world.change = format("{} {} {}", outcome.step, before.size, world.lost);
    around.console.message(describe(world, before, options.world_size(), decision.text));
  }
}

Outcome stopped_while_idle(int signal) {
  return {Outcome::Kind::stopped, 128 + signal, false,
          "stopped by " + signal_name(signal) + " while no rank was running"};
}

Outcome run_job(LaunchOptions& options, Poller& poller, Console& console, Signals& signals) {
  raise_open_file_limit();  // this one has pipes of all its ranks, and they inherit the limit
  const std::string token = choose_token(options);
  const Guard guard;  // before any thread and any rank
  try {
    NodeLink link(options, token, console, signals);
    const Fd token_fd = token_descriptor(token);
    const Fd memory = options.max_restarts > 0 ? make_recovery_memory(options.ranks) : Fd();
    const JobFacts facts{link.run_id(),
                         link.rendezvous(),
                         link.master_addr(),
                         link.master_port(),
                         token_fd.get(),
                         memory.get(),
                         static_cast<int>(allowed_cores().size())};
    std::optional<ForkServer> forks;
    if (options.forks) {
      World all;
      all.places.resize(static_cast<size_t>(options.ranks));
      std::iota(all.places.begin(), all.places.end(), 0);
      forks.emplace(options.command, rank_variables(options, facts, all, 0, 0, -1));
    }
    const Surroundings around{options, facts, poller, console,
                              signals, guard, link,   forks ? &*forks : nullptr};
    try {
      Outcome outcome = run_generations(around);
      link.leave(outcome);
      return outcome;
    } catch (const JobOver& over) {
      link.leave(over.outcome);
      return over.outcome;
    } catch (const Error& failure) {
      link.leave({Outcome::Kind::failed, 1, false, failure.what()});
      throw;
    } catch (const Interrupted& interrupted) {
      link.leave_stopped(stopped_while_idle(interrupted.signal), interrupted.signal);
      throw;
    }
  } catch (const Interrupted& interrupted) {
    return stopped_while_idle(interrupted.signal);
  }
}

// The reader of our output may be slow. A signal, or a job that was stopped, says not to wait.
void flush(Poller& poller, Console& console, Signals& signals, bool stopped) {
  const Deadline patience(stopped ? milliseconds{1'000} : std::chrono::hours{24 * 365});
  poller.watch(signals.fd(), EPOLLIN, [&] {
    if (const auto signal = signals.take(); signal && signals.asks_to_stop(*signal)) {
      console.discard();
    }
  });
  while (!console.empty()) {
    poller.wait(patience.left());
    if (patience.passed()) console.discard();
  }
  poller.forget(signals.fd());
}

}  // namespace

void validate(const LaunchOptions& options) {
  require(options.ranks >= 1 && options.ranks <= kMaxLocalRanks,
          format("-n {}: the number of ranks must be from 1 to {}", options.ranks, kMaxLocalRanks));
  require(
      options.nodes >= 1 && options.nodes <= kMaxNodes,
      format("--nnodes {}: the number of nodes must be from 1 to {}", options.nodes, kMaxNodes));
  require(options.node_rank >= 0 && options.node_rank < options.nodes,
          format("--node-rank {}: must be at least 0 and below --nnodes {}", options.node_rank,
                 options.nodes));
  require(options.max_restarts >= 0,
          format("--max-restarts {}: must be at least 0", options.max_restarts));
  require(
      !options.rank_bounds().is_elastic() || options.nodes == 1,
      format("-n {}:{} with --nnodes {}: on several nodes whole nodes come and go; use -n {} and "
             "--nnodes MIN:{}",
             options.min_ranks, options.ranks, options.nodes, options.ranks, options.nodes));
  require(!options.is_elastic() || options.max_restarts > 0,
          format("{}: needs --max-restarts of at least 1, because a job that is not started again "
                 "cannot continue with fewer",
                 options.rank_bounds().is_elastic()
                     ? format("-n {}:{}", options.min_ranks, options.ranks)
                     : format("--nnodes {}:{}", options.min_nodes, options.nodes)));
  require(options.grow_after.count() >= 1,
          format("--grow-after {}: must be at least 1 s", options.grow_after.count()));
  require(options.hang_rank >= -1 && options.hang_rank < options.world_size(),
          format("--hang-rank {}: must be at least 0 and below the world size {}",
                 options.hang_rank, options.world_size()));
  require(options.grace.count() >= 0 && options.stop_grace.count() >= 0,
          "--grace and --stop-grace: must be at least 0 ms");
  require(!options.command.empty() && !options.command.front().empty(),
          "no program: lockstep run -n N PROGRAM ARGS...");
  require(options.nodes == 1 || !options.rendezvous.empty(),
          format("--nnodes {}: needs --rendezvous HOST:PORT, an address of node 0", options.nodes));
  if (!options.rendezvous.empty()) {
    const HostPort where = parse_host_port(options.rendezvous, "--rendezvous");
    require(options.nodes == 1 || where.port != 0,
            format("--rendezvous {}: several nodes need a port that all know, not 0",
                   options.rendezvous));
  }
  require(options.meet_time.count() >= 1000, format("--rendezvous-timeout {}: must be at least 1 s",
                                                    options.meet_time.count() / 1000));
  if (!options.interface.empty()) address_of_interface(options.interface);
  require(
      options.nodes == 1 || !options.token_file.empty() || !secret_from_environment().empty(),
      format("--nnodes {}: the nodes need one secret: put it in a file that only you can read and "
             "give all of them --token-file FILE, or set LOCKSTEP_TOKEN_FILE or LOCKSTEP_TOKEN",
             options.nodes));
}

int run(const LaunchOptions& given) {
  LaunchOptions options = given;
  if (options.interface.empty()) options.interface = interface_from_environment();
  validate(options);
  prepare_logs(options);
  Poller poller;
  Signals signals(options.ranks_save);
  Console console(STDOUT_FILENO, STDERR_FILENO, poller);
  const Outcome outcome = run_job(options, poller, console, signals);
  if (!outcome.text.empty()) console.message(outcome.text);
  flush(poller, console, signals, outcome.kind == Outcome::Kind::stopped);
  return outcome.code;
}

}  // namespace lockstep::launch
