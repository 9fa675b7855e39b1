// SPDX-License-Identifier: Apache-2.0
// The machines that a step is timed on: devices, links, how well programs use them, and what the
// training program does that a step pays for. Private: not installed.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::plan {

struct Device {
  std::string name = {};
  double flops = 0;      // dense peak of the dtype that is trained in, per second
  double memory = 0;     // bytes
  double bandwidth = 0;  // of that memory, bytes per second
};

// Parts of the peak that programs reach. A product of x FLOP runs at
// product x / (x + product_half) of Device::flops.
struct Efficiency {
  double product = 0.6, product_half = 1e10;
  double attention = 0.25;   // of Device::flops, counting causal FLOP; fused attention only
  double memory = 0.7;       // of Device::bandwidth
  double score = 0;          // seconds of an attention score in forward, without its products
  double launch = 1e-3;      // seconds that the host needs for the forward pass of one block
  bool launch_adds = false;  // they are not under the computation: the host is the device
  double step = 0;           // seconds of a step that depend on nothing else
  // Of a block, and of the head, that one rank of a host computes while the others wait: its time
  // in parts of that while all compute.
  double alone = 1, alone_head = 1;
};

enum class Collective { all_reduce, all_gather, reduce_scatter };
std::string_view name_of(Collective op);

// Ranks of a group, and the hosts that they are on, in equal numbers.
struct GroupShape {
  int ranks = 1, hosts = 1;

  bool operator==(const GroupShape&) const = default;
};

// A measured collective. `bytes` is the whole buffer: the input of a reduction, the output of a
// gather.
struct MeasuredCollective {
  Collective op = Collective::all_reduce;
  GroupShape group = {};
  double bytes = 0, seconds = 0;
};

struct Links {
  // Inside a host: bus bandwidth as nccl-tests defines it, and the time of an empty collective.
  double host_bandwidth = 0, host_latency = 2e-5;
  // Between hosts: bytes per second of one host, and the time of one step of a ring.
  double network_bandwidth = 0, network_latency = 1e-5;
  // Groups that have g of the n ranks of each host get (g / n)^sharing of the bandwidth.
  double sharing = 1;
  double device_link = 2.5e10;  // between a device and its host, each way while both are busy
  double reduce_factor = 1;     // measured times of all-reduces are divided by this
  double gather_factor = 1;     // and those of all-gathers and reduce-scatters by this
  std::vector<MeasuredCollective> measured = {};
};

// What the training program does. The defaults are Lockstep's.
struct Software {
  double gradient_bytes = 0;    // of a gradient that is reduced; 0: as the parameter
  double accumulate_bytes = 0;  // moved for each parameter in every micro-batch
  double optimizer_bytes = 36;  // moved for each parameter in an update
  double logit_bytes = 40;      // moved for each logit in forward and backward
  double stream_bytes = 10;     // moved for each element of the stream in a block's forward pass
  double score_bytes = 0;       // moved for each attention score in forward; 0: fused attention
  double overlap = 0.7;         // part of the last backward that reductions can hide under
  bool overlap_scatter = true;  // also the reduce-scatters of a sharded optimizer
  bool reduce_each = false;     // sharded gradients are reduced in every micro-batch
  double slowdown = 0.3;        // of computation, in parts of the communication hidden under it
  // Of computation that ranks lose in waiting for each other at the collectives inside a layer: a
  // part for each doubling of the ranks that share it.
  double waiting = 0;
  bool regather = false;          // sequence parallelism gathers inputs again in backward
  bool scatter_messages = false;  // stages send 1/tp of their output from each rank
  double pipeline_launch = 0;  // seconds of a block's forward pass and tensor-parallel rank, where
                               // a pipeline spans hosts
};

struct Cluster {
  std::string name = {}, note = {};  // note: where the numbers come from
  int devices_per_node = 8;
  Device device = {};
  Links links = {};
  Efficiency efficiency = {};
  Software software = {};
  double error = 0.2;  // of predictions: part of the step time
};

// "a100", "h100" or "h200": a node of eight, with typical constants. ConfigError for other names.
Cluster typical_cluster(std::string_view name);

// Seconds of one collective over `bytes` in a group of this shape, while the other groups of the
// same kind do the same. Nothing for a group of one.
double collective_time(const Cluster& cluster, Collective op, GroupShape group, double bytes);

// Seconds of a message between two ranks while all ranks of their hosts send.
double message_time(const Cluster& cluster, bool same_host, double bytes);

}  // namespace lockstep::plan
