// SPDX-License-Identifier: Apache-2.0
// What all ways of adopting a communicator share. Private to comm.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/backend.h"

namespace lockstep::comm::detail {

// What the adopted communicator is used for before there is a group: the texts of all ranks, of at
// most kTextBytes each, on every rank.
using GatherTexts = std::function<std::vector<std::string>(const std::string& mine)>;
constexpr size_t kTextBytes = 2048;

// For engines that gather records of one size: the text, filled up with zeros, and back.
std::vector<std::byte> to_record(const std::string& text);
std::vector<std::string> from_records(std::span<const std::byte> records);

// Makes a rendezvous for these ranks and the group of all of them. `adopted` makes it and its
// splits over what is adopted, unless the options name another backend. Collective. A group of one
// for one rank.
Group adopt_world(int rank, int size, const GatherTexts& gather, Backend adopted,
                  InitOptions options);

}  // namespace lockstep::comm::detail
