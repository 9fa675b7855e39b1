// SPDX-License-Identifier: Apache-2.0
// What the ranks of a job learn of each other when they come together. Private to comm.
#pragma once

#include <string>
#include <vector>

#include "lockstep/core/rank_env.h"
#include "lockstep/launch/rendezvous/rendezvous.h"

namespace lockstep::comm::detail {

struct JobRoster {
  uint64_t incarnation = 0;  // a random number that all ranks have got from one of them
  std::vector<int> hosts;    // of every rank; numbered in order of their lowest rank
  // By which other hosts reach this rank: of the interface that LOCKSTEP_INTERFACE names, else of
  // the one that leads to the rendezvous.
  std::string address;
};

// Collective. Returns when all ranks are there, are of one version and have the same `common`
// lines. Throws the same on all of them where that is not so: ConfigError that says who differs in
// what, PeerLost, or TimeoutError that says who is missing.
JobRoster make_job_roster(launch::RendezvousClient& store, const RankEnv& env,
                          const std::vector<std::string>& common, const Deadline& deadline);

// The name of the host of a rank of the job; empty where it is not known.
std::string host_of(launch::Store& store, int rank);

// A number that no other start of communication has.
uint64_t new_incarnation();

// Where others may find a rendezvous that listens at this port of every address of this host;
// which of them they reach only they can find out. `named` is what the user calls the host, or
// empty: they try that first.
std::string places(const std::string& named, std::vector<std::string> addresses, uint16_t port);

// After a failure, on the rank that hosts the rendezvous: the others shall hear why, not that it
// is gone. A moment at most.
void let_others_hear(launch::Store& store);

// The same text for processes that share memory (they find each other in /proc) and a loopback
// device, another for all others: containers on one machine may share a name, and its boot id
// anyway.
std::string host_identity();

}  // namespace lockstep::comm::detail
