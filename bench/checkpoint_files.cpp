// Saves and loads a checkpoint of one file, and has dd write and read as many bytes in the same
// folder, in turn: what the checksums and the format cost.
//   bench_checkpoint_files DIR [GIB = 2] [ROUNDS = 3]
#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/core/clock.h"
#include "lockstep/core/fd.h"
#include "lockstep/formats/checkpoint_folder.h"
#include "lockstep/formats/checkpoint_reader.h"
#include "lockstep/formats/shard_file.h"

namespace {

using namespace lockstep;
using layout::Box;

constexpr int64_t kRows = 1024, kColumns = 32'768;  // 128 MiB a tensor

double seconds(const std::function<void()>& work) {
  const auto start = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void shell(const std::string& command) {
  if (std::system(command.c_str()) != 0) throw std::runtime_error(command + " failed");
}

// As after a restart, as far as this machine's own memory goes.
void forget(const std::string& path) {
  const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (fsync(fd.get()) != 0 || posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED) != 0) {
    throw std::runtime_error("cannot drop " + path + " from the cache");
  }
}

std::vector<formats::ShardSlice> slices_of(int tensors) {
  std::vector<formats::ShardSlice> slices;
  for (int i = 0; i < tensors; ++i) {
    slices.push_back({"layer." + std::to_string(i) + ".weight",
                      "F32",
                      {kRows, kColumns},
                      Box::whole({kRows, kColumns})});
  }
  return slices;
}

std::string save(const std::string& dir, const std::vector<formats::ShardSlice>& slices,
                 const std::vector<std::vector<float>>& values) {
  const auto folder = formats::begin_checkpoint(dir, 1);
  const auto file = formats::shard_file_name(1);
  auto writer = formats::open_shard(folder, file, slices);
  size_t next = 0;
  for (const auto& entry : writer.entries()) {
    writer.write(entry.name, std::as_bytes(std::span(values[next++])));
  }
  return formats::commit_checkpoint(dir, formats::shard_manifest(1, file, writer.finish(), slices));
}

void load(const std::string& path, std::vector<std::vector<float>>& values) {
  formats::CheckpointReader reader(path);
  size_t next = 0;
  for (const auto& [name, tensor] : reader.manifest().tensors) {
    reader.read(name, Box::whole(tensor.shape), std::as_writable_bytes(std::span(values[next++])));
  }
}

void run(const std::string& dir, int gib, int rounds) {
  std::filesystem::create_directories(dir);
  const auto slices = slices_of(gib * 8);
  std::vector<std::vector<float>> values(slices.size());
  for (size_t i = 0; i < values.size(); ++i) values[i].assign(kRows * kColumns, 0.1f * i);
  const auto plain = dir + "/plain";
  const double size = gib * 1.073741824;
  const auto report = [&](const char* what, double dd, double ours) {
    std::printf("%-9s dd %.2f GB/s, checkpoint %.2f GB/s: %.0f %%\n", what, size / dd, size / ours,
                100 * dd / ours);
  };
  std::string path;
  for (int round = 0; round < rounds; ++round) {
    std::filesystem::remove(plain);
    sync();
    const double dd = seconds([&] {
      shell("dd if=/dev/zero of=" + plain + " bs=1M count=" + std::to_string(gib * 1024) +
            " conv=fsync status=none");
    });
    std::filesystem::remove_all(dir + "/checkpoints");
    sync();
    report("save", dd, seconds([&] { path = save(dir + "/checkpoints", slices, values); }));
  }
  const auto shard = path + "/" + formats::shard_file_name(1);
  for (const bool cold : {true, false}) {
    for (int round = 0; round < rounds; ++round) {
      if (cold) forget(shard);
      const double dd =
          seconds([&] { shell("dd if=" + shard + " of=/dev/null bs=1M status=none"); });
      if (cold) forget(shard);
      report(cold ? "load cold" : "load warm", dd, seconds([&] { load(path, values); }));
    }
  }
  std::filesystem::remove(plain);
  std::filesystem::remove_all(dir + "/checkpoints");
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 2 || argc > 4) {
    throw std::runtime_error("usage: bench_checkpoint_files DIR [GIB] [ROUNDS]");
  }
  run(argv[1], argc > 2 ? std::atoi(argv[2]) : 2, argc > 3 ? std::atoi(argv[3]) : 3);
  return 0;
} catch (const std::exception& failure) {
  std::fprintf(stderr, "%s\n", failure.what());
  return 1;
}
