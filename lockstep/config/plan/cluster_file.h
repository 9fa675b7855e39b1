// SPDX-License-Identifier: Apache-2.0
// Descriptions of clusters in files. Private: not installed.
#pragma once

#include <string>
#include <vector>

#include "lockstep/plan/cluster.h"

namespace lockstep::config {

// A cluster as a file has it: TOML with the sections cluster, device, links, efficiency, software
// and, where it was measured, machine.
struct ClusterFile {
  plan::Cluster cluster = {};
  // Of a machine that was measured; empty: of none.
  std::string host = {}, build = {}, date = {};
};

// Numbers that only the file can know must be there, unless cluster.base names a shipped
// description. Throws ConfigError with the file, the key and the rule.
ClusterFile read_cluster(const std::string& path);
// `collectives` names the files of measured collectives, which are not in the text.
std::string to_toml(const ClusterFile& file, const std::string& collectives = "");

// Measured collectives: CSV with the columns op, hosts, ranks, bytes and seconds, or what a program
// of nccl-tests printed, whose name is in its text or in the path. Throws ConfigError.
std::vector<plan::MeasuredCollective> read_collectives(const std::string& path);

// A shipped description by name, or a file.
ClusterFile find_cluster(const std::string& name_or_path);
// Where `lockstep bench machine` writes and plan looks: LOCKSTEP_MACHINE, or a file of this host in
// the user's cache.
std::string machine_file();
// This host and build, as machine files name them.
std::string this_host();
std::string this_build();
// Throws ConfigError unless the file was measured on this host with this build.
void require_this_machine(const ClusterFile& file, const std::string& path);
// `name`, or where it is empty the machine file if there is one, or the shipped H100 node.
ClusterFile cluster_for(const std::string& name);

}  // namespace lockstep::config
