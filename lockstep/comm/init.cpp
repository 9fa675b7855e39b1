// How ranks come together: find the meeting point that the launcher left, learn who is on which
// host, choose a backend.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <mutex>
#include <sstream>
#include <thread>

#include "lockstep/comm/backend.h"
#include "lockstep/comm/group.h"
#include "lockstep/comm/mpi/bootstrap.h"
#include "lockstep/comm/mpi/mpi.h"
#include "lockstep/comm/torchrun_store.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/core/trace.h"

namespace lockstep::comm {
namespace {

using detail::World;

bool is_mpi_launcher(Launcher launcher) {
  return launcher == Launcher::openmpi || launcher == Launcher::mpich ||
         launcher == Launcher::mvapich || launcher == Launcher::pmix;
}

std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof(name) - 1);
  return name;
}

// The same text for processes that can share memory, another for all others.
std::string host_identity() {
  if (const char* given = std::getenv("LOCKSTEP_HOST")) return given;
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return host_name() + " " + boot;
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

// Starts a meeting point on this rank and returns what the others need to know of it.
struct Hosted {
  std::shared_ptr<launch::RendezvousServer> server;
  std::string address, token;
};

Hosted host_rendezvous(const RankEnv& env, const std::string& bind_address) {
  Hosted hosted;
  hosted.token = launch::make_token();
  hosted.server = std::make_shared<launch::RendezvousServer>(hosted.token, bind_address);
  hosted.address = hosted.server->address();
  const bool everywhere = hosted.address.starts_with("0.0.0.0:");
  if (everywhere)
    hosted.address =
        (env.master_addr.empty() ? host_name() : env.master_addr) + hosted.address.substr(7);
  return hosted;
}

// The launcher gives a way to share one text; rank 0 hosts the meeting point and shares where it
// is.
template <class Share>
void meet_through(World& world, const RankEnv& env, const Deadline& deadline,
                  Share share_from_rank0) {
  const bool one_host = env.local_size.value_or(0) == env.world_size;
  Hosted hosted;
  if (env.rank == 0) hosted = host_rendezvous(env, one_host ? "127.0.0.1:0" : "0.0.0.0:0");
  std::istringstream words(share_from_rank0(hosted.address + " " + hosted.token));
  std::string address, token;
  words >> address >> token;
  world.server = hosted.server;
  world.store = std::make_shared<launch::RendezvousClient>(
      address, token, launch::Identity{env.rank, env.world_size, 0}, deadline);
}

// Nothing but an address that all ranks know: rank 0 listens there.
void meet_at_address(World& world, const RankEnv& env, const Deadline& deadline) {
  if (env.master_addr.empty() || env.master_port == 0) {
    throw ConfigError(
        format("[init] rank {} of {}: {} gives no meeting point; set MASTER_ADDR and MASTER_PORT, "
               "or use lockstep run",
               env.rank, env.world_size, name_of(env.launcher)));
  }
  const std::string address = format("{}:{}", env.master_addr, env.master_port);
  std::string token = launch::token_from_environment();
  if (token.empty()) {
    // No secret can be agreed on without a launcher that carries one; this keeps different jobs
    // apart, no more.
    token = "job:" + address;
    if (env.rank == 0)
      log::debug("LOCKSTEP_TOKEN is not set: any process that reaches " + address +
                 " can join the job");
  }
  if (env.rank == 0) world.server = std::make_shared<launch::RendezvousServer>(token, address);
  world.store = std::make_shared<launch::RendezvousClient>(
      address, token, launch::Identity{env.rank, env.world_size, 0}, deadline);
}

void meet(World& world, const RankEnv& env, const Deadline& deadline) {
  if (env.launcher == Launcher::lockstep) {
    world.store = launch::connect_from_environment(env.rank, env.world_size, deadline);
  } else if (is_mpi_launcher(env.launcher)) {
    meet_through(world, env, deadline, mpi::share_from_rank0);
  } else if (torchrun_hosts_store()) {
    meet_through(world, env, deadline, [&](const std::string& text) {
      return share_through_torchrun(env, text, deadline);
    });
  } else {
    meet_at_address(world, env, deadline);
  }
}

// Numbers the hosts in order of their lowest rank. One rank collects, the others read one key.
std::vector<int> learn_hosts(launch::Store& store, const RankEnv& env, const Deadline& deadline) {
  store.set(format("host/{}", env.rank), host_identity());
  if (env.rank == 0) {
    std::vector<std::string> known;
    std::vector<int> numbers;
    for (int rank = 0; rank < env.world_size; ++rank) {
      std::string host;
      try {
        host = store.get(format("host/{}", rank), deadline);
      } catch (const TimeoutError&) {
        std::vector<int> missing;
        for (int late = 0; late < env.world_size; ++late) {
          if (!store.find(format("host/{}", late))) missing.push_back(late);
        }
        throw TimeoutError(format("[init] {} of {} ranks came; missing: {}",
                                  env.world_size - static_cast<int>(missing.size()), env.world_size,
                                  join(missing)));
      }
      const auto found = std::find(known.begin(), known.end(), host);
      numbers.push_back(static_cast<int>(found - known.begin()));
      if (found == known.end()) known.push_back(host);
    }
    store.set("hosts", join(numbers, " "));
    return numbers;
  }
  std::istringstream words(store.get(
      "hosts",
      Deadline(deadline.left() + milliseconds{1000})));  // rank 0's message is the better one
  std::vector<int> numbers;
  for (int number = 0; words >> number;) numbers.push_back(number);
  return numbers;
}

Group make_world(const RankEnv& env, std::shared_ptr<World> world, std::string backend) {
  if (backend == "auto") {
    const bool one_host =
        std::all_of(world->hosts.begin(), world->hosts.end(), [](int host) { return host == 0; });
    backend = one_host                                               ? "shm"
              : is_mpi_launcher(env.launcher) && mpi::is_available() ? "mpi"
                                                                     : "gloo";
  }
  detail::Membership membership{"world", env.rank, {}, std::move(world)};
  for (int rank = 0; rank < env.world_size; ++rank) membership.members.push_back(rank);
  return Group(detail::find_backend(backend).create(std::move(membership)));
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
  if (env.world_size == 1) return {};
  auto world = std::make_shared<World>();
  world->timeout = options.timeout;
  world->check = options.check;
  const Deadline deadline(options.timeout);
  meet(*world, env, deadline);
  world->hosts = learn_hosts(*world->store, env, deadline);
  return make_world(env, std::move(world), options.backend);
}

void run_threads(int size, const std::function<void(Group)>& body, InitOptions options) {
  if (size < 1) throw ConfigError(format("[run_threads] size is {}, must be at least 1", size));
  options = with_environment(std::move(options));
  if (options.backend == "mpi")
    throw ConfigError("[run_threads] backend 'mpi' has processes as ranks: use mpirun and init");
  const auto store = std::make_shared<launch::LocalStore>();
  std::mutex mutex;
  std::exception_ptr first_failure;
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          trace::name_thread(rank, "compute");
          auto world = std::make_shared<World>();
          world->store = store;
          world->hosts.assign(static_cast<size_t>(size), 0);
          world->timeout = options.timeout;
          world->check = options.check;
          const RankEnv env{.rank = rank, .world_size = size};
          body(size == 1 ? Group()
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
