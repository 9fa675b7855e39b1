// SPDX-License-Identifier: Apache-2.0
// Folders of checkpoints. DIR/step-00000100 is complete if it has a manifest.json, and appears in
// one rename when all it holds is on disk: whenever a process is killed or the power fails, the
// last complete one is there. docs/checkpoints.md has the protocol.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/formats/manifest.h"

namespace lockstep::io {
class FolderLock;
}

namespace lockstep::formats {

// A complete checkpoint. The path may end in ".old": a replacement of that step was cut off.
struct Checkpoint {
  int64_t step = 0;
  std::string path;

  bool operator==(const Checkpoint&) const = default;
};

std::string step_folder_name(int64_t step);  // "step-00000100"

// Makes the folder and tries to write there; ConfigError where that fails, or where another process
// saves there.
void check_writable(const std::string& dir);

// Saving. One process begins; any number write files (open_shard) into the folder it returns; when
// they are done, one process commits, with the manifest of all of them. Beginning again removes
// what an earlier attempt at this step left. Saves into one DIR must not overlap in time.
std::string begin_checkpoint(const std::string& dir, int64_t step);
// The final path, after which the checkpoint is complete and on disk. Replaces one of the same
// step. CheckpointError where the manifest does not hold together, its files are not there, or the
// lock is no longer this process's.
std::string commit_checkpoint(const std::string& dir, const Manifest& manifest,
                              const io::FolderLock* lock = nullptr);
// After a save that failed: removes what it wrote, so that a full disk gets its space back. What
// was complete stays, also where it was about to be replaced.
void abandon_checkpoint(const std::string& dir, int64_t step);

// All with a manifest, by step; empty where there is no such folder.
std::vector<Checkpoint> list_complete(const std::string& dir);
// The newest of steps below `before` whose manifest is sound and whose files have the right sizes;
// others are skipped with a warning.
std::optional<Checkpoint> newest_complete(const std::string& dir,
                                          int64_t before = std::numeric_limits<int64_t>::max());

// The manifest of a checkpoint, its files' sizes compared: CheckpointError, or SystemError where it
// cannot be read.
Manifest read_manifest(const std::string& path);
// Which of a checkpoint's files to read: every `shares`-th of them, from number `share` on.
struct VerifyShare {
  int share = 0, shares = 1;
};

// Reads every byte: sizes, checksums, and headers against the manifest. CheckpointError names the
// file.
Manifest verify(const std::string& path, const VerifyShare& files = {});
// Those in the folder that verify() accepts, the newest first. Reads all that is there.
std::vector<Checkpoint> list_sound(const std::string& dir);

// Makes DIR/best a relative link to the checkpoint of this step. Leaves it as it is where there is
// no complete checkpoint of the step.
void link_best(const std::string& dir, int64_t step);
// The step that DIR/best links to; none where there is no link, or no complete checkpoint behind
// it.
std::optional<int64_t> best_step(const std::string& dir);

// Removes all but the `keep` newest sound ones (by step) and DIR/best's, and what saves and
// removals of steps up to the newest left behind. Damaged ones stay, for inspection.
void prune(const std::string& dir, int keep);

}  // namespace lockstep::formats
