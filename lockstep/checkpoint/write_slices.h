// SPDX-License-Identifier: Apache-2.0
// The two halves of a save: who writes what, and the writing. Private: not installed.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/comm/group.h"
#include "lockstep/io/folder_lock.h"

namespace lockstep::checkpoint::detail {

// Collective. The request with those of the slices that this rank writes, so that every one is
// written once. Throws what is wrong with them.
SaveRequest share_of(const SaveRequest& request, const comm::Group& group);

using Sink = std::function<void(std::span<const std::byte>)>;
// Gives the bytes of the slice of this number, row-major, in pieces of any size.
using Bytes = std::function<void(size_t slice, const Sink& sink)>;

// All bytes of a tensor.
void give_bytes(const at::Tensor& tensor, const Sink& sink);

// The folder's lock, which rank 0 holds for all.
using Lock = std::unique_ptr<io::FolderLock>;

// Takes it, or makes sure that it is still held. Not collective.
void take_lock(Lock& lock, const std::string& dir);

// Collective. Takes the lock, writes the checkpoint, of which `request.slices` are this rank's
// share, removes older ones, and returns its path. Where a rank fails all throw, and nothing is
// left of it.
std::string write(Lock& lock, const std::string& dir, const SaveRequest& request,
                  const Bytes& bytes, const comm::Group& group);

}  // namespace lockstep::checkpoint::detail
