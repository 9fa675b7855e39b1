// SPDX-License-Identifier: Apache-2.0
// How ranks come together: find the rendezvous that the launcher left, learn who is on which
// host, choose a backend.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <sstream>
#include <thread>

#include "lockstep/comm/adopt.h"
#include "lockstep/comm/backend.h"
#include "lockstep/comm/backends/mpi/bootstrap.h"
#include "lockstep/comm/backends/mpi/mpi.h"
#include "lockstep/comm/backends/nccl/devices.h"
#include "lockstep/comm/backends/nccl/runtime.h"
#include "lockstep/comm/bootstrap/torchrun_store.h"
#include "lockstep/comm/control/job_roster.h"
#include "lockstep/comm/control/rank_error.h"
#include "lockstep/comm/group.h"
#include "lockstep/comm/message_fault.h"
#include "lockstep/comm/shared_objects.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/core/open_files.h"
#include "lockstep/core/trace.h"
#include "lockstep/flight/recorder.h"
#include "lockstep/launch/rendezvous/network_interface.h"
#include "lockstep/launch/rendezvous/secret.h"
#include "lockstep/launch/rendezvous/socket.h"

namespace lockstep::comm {
namespace {

using detail::Contribution;
using detail::World;

bool is_mpi_launcher(Launcher launcher) {
  return launcher == Launcher::openmpi || launcher == Launcher::mpich ||
         launcher == Launcher::mvapich || launcher == Launcher::pmix;
}

InitOptions with_environment(InitOptions options) {
  if (options.timeout <= milliseconds{0}) {
    options.timeout = kDefaultTimeout;
    if (const char* seconds = std::getenv("LOCKSTEP_TIMEOUT")) {
      options.timeout = milliseconds(static_cast<int64_t>(std::atof(seconds) * 1000));
      if (options.timeout <= milliseconds{0})
        throw ConfigError(
            format("LOCKSTEP_TIMEOUT={} must be a number of seconds above 0", seconds));
    }
  }
  if (const char* check = std::getenv("LOCKSTEP_CHECK"))
    options.check = std::string_view(check) != "0";
  return options;
}

using Client = std::shared_ptr<launch::RendezvousClient>;

Client join_at(const std::string& address, const std::string& token, const RankEnv& env,
               const Deadline& deadline) {
  return std::make_shared<launch::RendezvousClient>(
      address, token, launch::Identity{env.rank, env.world_size, 0}, deadline);
}

// The rendezvous on this rank. It stays until the other ranks have left too, because they may still
// communicate with each other, and takes at most the deadline of operations for that. If this rank
// has failed they shall notice at once.
std::shared_ptr<launch::RendezvousServer> host_at(const std::string& address,
                                                  const std::string& token, const RankEnv& env,
                                                  milliseconds timeout) {
  const launch::RendezvousServer::Expected expected{.ranks = env.world_size, .single = true};
  return {new launch::RendezvousServer(token, address, expected),
          [timeout](launch::RendezvousServer* server) {
            const std::unique_ptr<launch::RendezvousServer> owned(server);
            if (std::uncaught_exceptions() == 0) owned->wait_until_left(Deadline(timeout));
          }};
}

// Starts a rendezvous server on this rank, if the environment names no other.
std::shared_ptr<launch::RendezvousServer> host_anywhere(const RankEnv& env,
                                                        const std::string& token,
                                                        milliseconds timeout) {
  using launch::HostPort;
  const std::string interface = launch::interface_from_environment();
  HostPort place{"::", 0};
  if (env.local_size.value_or(0) == env.world_size) {
    place.host = "127.0.0.1";
  } else if (!interface.empty()) {
    place.host = launch::address_of_interface(interface, env.master_addr);
  }
  try {
    return host_at(place.text(), token, env, timeout);
  } catch (const SystemError&) {
    if (place.host != "::") throw;
  }
  // A host without IPv6.
  return host_at("0.0.0.0:0", token, env, timeout);
}

// What others may call it.
std::string places_of(const launch::RendezvousServer& server, const RankEnv& env) {
  const auto place = launch::parse_host_port(server.address(), "rendezvous");
  if (place.host != "::" && place.host != "0.0.0.0") return server.address();
  return detail::places(env.master_addr, launch::outward_addresses(), place.port);
}

// What rank `rank` has contributed. Throws ConfigError where it could not.
std::string value_of(int rank, const std::string& text) {
  if (const auto error = Contribution::error_in(text))
    throw ConfigError(format("[init] rank {} cannot join: {}", rank, error->message));
  return Contribution::value_in(text);
}

// The launcher gives a way to share one text; rank 0 hosts the rendezvous and shares where it
// is and a name for the job. Without a secret of the user's, who can read that text can join.
template <class Share>
Client meet_through(World& world, const RankEnv& env, const Deadline& deadline,
                    Share share_from_rank0) {
  std::string secret;
  const Contribution mine(
      env.rank,
      [&]() -> std::string {
        secret = launch::secret_from_environment();
        if (env.rank != 0) return {};
        const std::string job = launch::make_token();
        world.server = host_anywhere(env, launch::token_for_job(secret, job), world.timeout);
        return places_of(*world.server, env) + " " + job;
      },
      detail::kTextBytes);
  const std::string shared = share_from_rank0(mine.text());
  mine.throw_if_failed();
  std::istringstream words(value_of(0, shared));
  std::string address, job;
  words >> address >> job;
  return join_at(address, launch::token_for_job(secret, job), env, deadline);
}

// Two steps of a Slurm job may be given one port: neither may take the other's ranks for its own.
std::string job_name(const RankEnv& env, const std::string& address) {
  if (env.launcher != Launcher::slurm) return address;
  const auto variable = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  return format("{} slurm {}.{}", address, variable("SLURM_JOB_ID"), variable("SLURM_STEP_ID"));
}

// Once in a process, however often it starts communication.
void warn_of_open_job(const std::string& address) {
  static std::once_flag once;
  std::call_once(once, [&] {
    log::warn(
        format("[init] the job has no secret: any process that reaches {} can join it. To prevent "
               "that, set LOCKSTEP_TOKEN_FILE on all ranks to a file of mode 0600 that holds a "
               "random text",
               address));
  });
}

// Nothing but an address that all ranks know: rank 0 listens there.
Client meet_at_address(World& world, const RankEnv& env, const Deadline& deadline) {
  if (env.master_addr.empty() || env.master_port == 0) {
    throw ConfigError(format(
        "[init] rank {} of {}: {} gives no rendezvous address; set MASTER_ADDR and MASTER_PORT, "
        "or use lockstep run",
        env.rank, env.world_size, name_of(env.launcher)));
  }
  const launch::HostPort place{env.master_addr, static_cast<uint16_t>(env.master_port)};
  const std::string address = place.text();
  const std::string secret = launch::token_from_environment();
  // Without a secret this keeps different jobs apart, no more.
  const std::string token =
      launch::token_for_job(secret, job_name(env, secret.empty() ? address : ""));
  if (env.rank != 0) return join_at(address, token, env, deadline);
  const std::string interface = launch::interface_from_environment();
  if (interface.empty() && !launch::wait_for_name(place.host, Deadline(milliseconds{0}))) {
    log::warn(format("[init] rank 0 waits until this host can resolve the name '{}'", place.host));
    launch::wait_for_name(place.host, deadline);
  }
  const auto here = launch::listening_address(place, interface);
  if (secret.empty()) warn_of_open_job(here.text());
  world.server = host_at(here.text(), token, env, world.timeout);
  return join_at(world.server->address(), token, env, deadline);
}

Client meet(World& world, const RankEnv& env, const Deadline& deadline) {
  if (env.launcher == Launcher::lockstep)
    return launch::connect_from_environment(env.rank, env.world_size, deadline);
  if (is_mpi_launcher(env.launcher)) {
    launch::give_links_time();
    return meet_through(world, env, deadline, mpi::share_from_rank0);
  }
  if (torchrun_hosts_store()) {
    return meet_through(world, env, deadline, [&](const std::string& text) {
      return share_through_torchrun(env, text, deadline);
    });
  }
  return meet_at_address(world, env, deadline);
}

void complete(World& world, const RankEnv& env, const Client& store, const std::string& backend,
              const Deadline& deadline) {
  const std::vector<std::string> common{
      "backend " + backend, format("strategy {}", layout::name_of(world.strategy)),
      world.check ? "operations are compared" : "operations are not compared",
      nccl::cuda_runtime() != nullptr ? "a build with CUDA" : "a build without CUDA"};
  world.store = store;
  if (nccl::cuda_runtime() != nullptr) nccl::publish_devices(*store, env.rank);
  try {
    detail::JobRoster roster = detail::make_job_roster(*store, env, common, deadline);
    world.incarnation = roster.incarnation;
    world.hosts = std::move(roster.hosts);
    world.address = std::move(roster.address);
    trace::begin_run(world.incarnation, env.rank);
  } catch (const Error&) {
    if (world.server) detail::let_others_hear(*store);
    throw;
  }
}

void init_single(World& world) {
  world.store = std::make_shared<launch::LocalStore>();
  world.incarnation = detail::new_incarnation();
  world.hosts = {0};
  if (nccl::cuda_runtime() != nullptr) nccl::publish_devices(*world.store, 0);
}

// Engines that read their interface from a variable when they start.
void name_interface_to_engines() {
  const std::string interface = launch::interface_from_environment();
  if (interface.empty()) return;
  launch::address_of_interface(interface);  // throws where there is none
  setenv("OMPI_MCA_btl_tcp_if_include", interface.c_str(), 0);
  setenv("NCCL_SOCKET_IFNAME", ("=" + interface).c_str(), 0);
}

std::shared_ptr<World> world_with(const InitOptions& options) {
  auto world = std::make_shared<World>();
  world->timeout = options.timeout;
  world->check = options.check;
  world->strategy = options.strategy;
  world->force_backend_on_single_rank = options.force_backend_on_single_rank;
  return world;
}

std::string choose_host_backend(const RankEnv& env, const World& world) {
  if (std::all_of(world.hosts.begin(), world.hosts.end(), [](int host) { return host == 0; }))
    return "shm";
  return is_mpi_launcher(env.launcher) && mpi::is_available() ? "mpi" : "gloo";
}

// NCCL where every rank can use it. All ranks have one build, and so come here together or not.
std::string choose_backend(const RankEnv& env, World& world, const std::string& wanted,
                           const Deadline& deadline) {
  world.host_backend = choose_host_backend(env, world);
  if (nccl::cuda_runtime() == nullptr || (wanted != "auto" && wanted != "nccl"))
    return wanted == "auto" ? world.host_backend : wanted;
  const std::string problem = nccl::agree_on_devices(*world.store, env.rank, world.hosts, deadline);
  if (problem.empty()) return "nccl";
  if (wanted == "nccl") throw ConfigError("[init] backend 'nccl': " + problem);
  log::debug(format("[init] not nccl: {}", problem));
  return world.host_backend;
}

Group make_world(const RankEnv& env, std::shared_ptr<World> world, const std::string& backend) {
  world->fault = detail::MessageFault::from_environment(env.rank);
  detail::Membership membership{"world", env.rank, {}, std::move(world)};
  for (int rank = 0; rank < env.world_size; ++rank) membership.members.push_back(rank);
  return Group(detail::make_group(std::move(membership), backend));
}

}  // namespace

Group init(InitOptions options) { return init(RankEnv::detect(), std::move(options)); }

Group init(const RankEnv& env, InitOptions options) {
  options = with_environment(std::move(options));
  if (options.backend != "auto") detail::find_backend(options.backend);
  if (options.backend == "thread")
    throw ConfigError("[init] backend 'thread' makes its ranks itself: use run_threads");
  log::set_rank(env.rank);
  trace::name_thread(env.rank, "compute");
  raise_open_file_limit();
  flight::start(env.rank, env.world_size);
  // A launcher's pipe would make it fully buffered: lines would come late, and not at all from a
  // rank that dies.
  if (env.world_size > 1) std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
  name_interface_to_engines();
  if (env.world_size == 1 && !options.force_backend_on_single_rank) return {};
  auto world = world_with(options);
  const Deadline deadline(options.timeout);
  if (env.world_size == 1) {
    init_single(*world);
  } else {
    complete(*world, env, meet(*world, env, deadline), options.backend, deadline);
  }
  const std::string backend = choose_backend(env, *world, options.backend, deadline);
  return make_world(env, std::move(world), backend);
}

Group detail::adopt_world(int rank, int size, const GatherTexts& gather, Backend adopted,
                          InitOptions options) {
  log::set_rank(rank);
  trace::name_thread(rank, "compute");
  raise_open_file_limit();
  flight::start(rank, size);
  const Contribution host(
      rank,
      [&] {
        options = with_environment(std::move(options));
        if (options.backend != "auto") find_backend(options.backend);
        if (options.backend == "thread")
          throw ConfigError("[adopt] backend 'thread' makes its ranks itself: use run_threads");
        name_interface_to_engines();
        return host_identity().substr(0, kTextBytes - 1);  // a mark precedes it
      },
      kTextBytes);
  std::vector<std::string> hosts = gather(host.text());
  host.throw_if_failed();
  for (int other = 0; other < size; ++other) {
    std::string& text = hosts[static_cast<size_t>(other)];
    text = value_of(other, text);
  }
  if (size == 1) return {};
  auto world = world_with(options);
  const bool one_host =
      std::ranges::all_of(hosts, [&](const auto& host) { return host == hosts[0]; });
  const RankEnv env{.rank = rank,
                    .world_size = size,
                    .local_size = one_host ? std::optional(size) : std::nullopt};
  const Deadline deadline(options.timeout);
  const auto store =
      meet_through(*world, env, deadline, [&](const std::string& text) { return gather(text)[0]; });
  complete(*world, env, store, options.backend, deadline);
  std::string backend = adopted.name;
  if (options.backend == "auto" || options.backend == backend) {
    world->host_backend = backend;
    world->adopted = std::move(adopted);
  } else {
    backend = choose_backend(env, *world, options.backend, deadline);
  }
  return make_world(env, std::move(world), backend);
}

std::vector<std::byte> detail::to_record(const std::string& text) {
  check(text.size() <= kTextBytes, "a text fits its record");
  const auto bytes = std::as_bytes(std::span(text));
  std::vector<std::byte> record(bytes.begin(), bytes.end());
  record.resize(kTextBytes);
  return record;
}

std::vector<std::string> detail::from_records(std::span<const std::byte> records) {
  std::vector<std::string> texts;
  for (; !records.empty(); records = records.subspan(kTextBytes)) {
    const auto* text = reinterpret_cast<const char*>(records.data());
    texts.emplace_back(text, strnlen(text, kTextBytes));
  }
  return texts;
}

void run_threads(int size, const std::function<void(Group)>& body, InitOptions options,
                 std::vector<int> hosts) {
  if (size < 1) throw ConfigError(format("[run_threads] size is {}, must be at least 1", size));
  if (hosts.empty()) hosts.assign(static_cast<size_t>(size), 0);
  if (hosts.size() != static_cast<size_t>(size))
    throw ConfigError(format("[run_threads] {} hosts for {} ranks", hosts.size(), size));
  options = with_environment(std::move(options));
  if (options.backend == "mpi")
    throw ConfigError("[run_threads] backend 'mpi' has processes as ranks: use mpirun and init");
  const auto store = std::make_shared<launch::LocalStore>();
  const uint64_t incarnation = detail::new_incarnation();
  const auto objects = std::make_shared<detail::SharedObjects>();
  std::mutex mutex;
  std::exception_ptr first_failure;
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          trace::name_thread(rank, "compute");
          auto world = world_with(options);
          world->store = store;
          world->incarnation = incarnation;
          world->objects = objects;
          world->hosts = hosts;
          world->address = "127.0.0.1";  // whatever hosts they count as
          world->host_backend = "thread";
          const RankEnv env{.rank = rank, .world_size = size};
          body(size == 1 && !options.force_backend_on_single_rank
                   ? Group()
                   : make_world(env, std::move(world),
                                options.backend == "auto" ? "thread" : options.backend));
        } catch (...) {
          const std::lock_guard lock(mutex);
          if (!first_failure) first_failure = std::current_exception();
        }
      });
    }
  }
  if (first_failure) std::rethrow_exception(first_failure);
}

}  // namespace lockstep::comm
