// SPDX-License-Identifier: Apache-2.0
// Ranks with a GPU each. What lies in host memory goes through a companion: a group of the backend
// that would be used without NCCL.
#pragma once

#include <string>

#include "lockstep/comm/backend.h"

struct ncclComm;

namespace lockstep::comm::nccl {

struct Engine;

// Why this process cannot use NCCL; empty if it can.
std::string problem();
bool is_available();
std::string version();  // "NCCL 2.28.3"; empty where it is not available
std::shared_ptr<detail::GroupImpl> create(detail::Membership membership);

// The same on an engine of one's own, for add_backend(). It must live as long as the
// groups.
detail::Factory factory(const Engine& engine, const std::string& name);

// `companion` carries what lies in host memory; `comm` is the program's, for these ranks.
std::shared_ptr<detail::GroupImpl> adopt(const Engine& engine, ncclComm* comm,
                                         std::shared_ptr<detail::GroupImpl> companion);

}  // namespace lockstep::comm::nccl
