// SPDX-License-Identifier: Apache-2.0
// A user's own backend: how bytes get from rank to rank. Registered by name, then chosen like any
// other with InitOptions::backend.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/core/clock.h"
#include "lockstep/fabric/operation.h"
#include "lockstep/launch/rendezvous/store.h"

namespace lockstep::comm {

// Connects the ranks of one group. Three functions are enough: collectives are made of messages,
// and deadlines, lost peers, checks, traces and every dtype and reduction are the library's.
//
// Calls come from threads of the library and may block. Sends to one peer come one after another,
// and so do receives from one peer, and run(); everything else may happen at the same time. What a
// call throws ends the operation, with PeerLost where a rank is gone, and breaks the group.
class Transport {
 public:
  // What was sent must still arrive.
  virtual ~Transport() = default;

  // A stream of bytes to each peer and one from each: never empty, cut alike on both sides. Returns
  // when `data` may be used again; need not wait for the peer.
  virtual void send(int peer, std::span<const std::byte> data) = 0;
  virtual void recv(int peer, std::span<std::byte> data) = 0;
  // Lets calls that block return or throw soon, and so all later ones. From any thread, while
  // others are in calls; may come twice.
  virtual void abort() noexcept = 0;

  // Collectives that it can do better than messages do; `run` does one, from beginning to end. The
  // answer must be the same on all ranks, so it may look at the kind, dtype, reduction and count
  // only. Memory is the CPU's; an empty collective is asked for like any other.
  virtual bool runs(const fabric::Operation&) const { return false; }
  virtual void run(const fabric::Operation&) {}
};

// What a transport is made from.
struct TransportSite {
  std::string name;        // unique in the job, the same on all ranks of the group
  int rank = 0, size = 1;  // in the group
  std::vector<int> hosts;  // of each rank of the group: equal numbers are one host
  milliseconds timeout;
  // Where ranks leave each other addresses. Shared by the whole job: begin keys with the name.
  std::shared_ptr<launch::Store> store;
};

// Collective over the ranks of a group. Called twice for the world and for every split: collectives
// and messages have a transport each, because neither may wait for the other.
using TransportFactory = std::function<std::unique_ptr<Transport>(const TransportSite&)>;

// A name can be registered once. This table is process-wide state because names are: register
// before the first init(), from one place.
void register_backend(const std::string& name, TransportFactory create);

// What every backend must do, as checks that any program can run.
struct ConformanceCheck {
  std::string name;
  // Runs on all ranks of the group together, against plain tensor arithmetic. Throws what does not
  // hold.
  std::function<void(const Group&)> run;
};

// All of them, with tensors on `device` ("cpu", "cuda:0"). With `large`, also one of more than 2^31
// elements (about 7 GB for two ranks).
std::vector<ConformanceCheck> conformance_checks(bool large = false,
                                                 const std::string& device = "cpu");

}  // namespace lockstep::comm
