#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Follows the README on machines that have nothing but Debian 12: builds, tests and packages Lockstep in one bare system, and
# uses the package in another. Prints how many minutes each phase took. Needs root, debootstrap, some 12 GB and a Debian mirror.
#
# usage: fresh_machine.sh FOLDER [PHASE...]
#
# Without phases all of them run, in this order. A later run with some of them continues with the systems in FOLDER.
#   bootstrap  two bare systems in FOLDER, and a clone of this repository's HEAD in the first
#   tools      apt-get install make git: all that a user needs before `make`
#   train      make train; TRAIN_ARGS="--train.steps 40 --optim.warmup 5" makes it short
#   test       make test
#   package    make package
#   install    the package in the second system, with what it depends on and nothing else
#   selftest   lockstep selftest -n 2 there
#   consumer   what the package recommends, then examples/consumer, built against the package and run with two ranks
#
# Environment: LOCKSTEP_MIRROR (http://deb.debian.org/debian), TRAIN_ARGS, JOBS, and http_proxy and the like. Settings of apt
# in /etc/apt/apt.conf.d, such as a proxy, hold in the new systems too. Each phase has a log, FOLDER/PHASE.log.
set -eu

phases="bootstrap tools train test package install selftest consumer"
mirror=${LOCKSTEP_MIRROR:-http://deb.debian.org/debian}

fail() {
  echo "fresh_machine: $1" >&2
  exit 2
}

# The script runs in a mount namespace of its own. What is mounted in it ends with its last process, however that ends, and removing
# FOLDER can never reach the real /dev.
if [ "${1:-}" != --in-namespace ]; then
  [ $# -ge 1 ] || fail "usage: fresh_machine.sh FOLDER [PHASE...]; phases: $phases"
  missing=""
  [ "$(id -u)" = 0 ] || missing="root"
  for program in debootstrap git unshare chroot; do
    command -v "$program" >/dev/null 2>&1 || missing="$missing $program"
  done
  [ -z "$missing" ] || fail "missing: ${missing# }"
  unshare --mount true 2>/dev/null || fail "missing: the right to mount (CAP_SYS_ADMIN)"
  exec unshare --mount --propagation private -- "$0" --in-namespace "$@"
fi
shift

source_dir=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
chosen=${*:-$phases}
for name in $chosen; do
  case " $phases " in *" $name "*) ;; *) fail "there is no phase '$name'; phases: $phases" ;; esac
done
builder=$folder/builder.root
user=$folder/user.root
mounted=""

# ---- systems ----

# The mounts that programs expect, for a system that exists.
enter() {
  [ -x "$1/usr/bin/apt-get" ] || { echo "$1 is not a system; run the phase bootstrap first"; return 1; }
  case "$mounted" in *"<$1>"*) return 0 ;; esac
  mount -t proc proc "$1/proc" && mount --rbind /sys "$1/sys" && mount --rbind /dev "$1/dev" || return 1
  mounted="$mounted<$1>"
}

leave() {
  for root in "$builder" "$user"; do
    case "$mounted" in *"<$root>"*) umount --lazy "$root/proc" "$root/sys" "$root/dev" || true ;; esac
  done
  mounted=""
}

# inside ROOT SCRIPT: runs the script in a system, with an environment of its own.
inside() {
  root=$1 script=$2
  enter "$root" || return 1
  set -- HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive
  for variable in http_proxy https_proxy no_proxy TRAIN_ARGS JOBS; do
    value=$(printenv "$variable" || true)
    [ -z "$value" ] || set -- "$@" "$variable=$value"
  done
  chroot "$root" /usr/bin/env -i "$@" sh -euxc "$script"
}

# Settings for downloads only: hooks of other files may need programs that a bare system does not have.
copy_apt_settings() {
  for file in /etc/apt/apt.conf /etc/apt/apt.conf.d/*; do
    if [ -f "$file" ] && grep -q 'Acquire' "$file" && ! grep -q -e 'Invoke' -e 'Install-Pkgs' "$file"; then
      cp "$file" "$1/etc/apt/apt.conf.d/90host-$(basename "$file")" || return 1
    fi
  done
}

# ---- phases ----

bootstrap() {
  include=""
  case $mirror in https:*) include=--include=ca-certificates ;; esac
  # debootstrap downloads with wget, which does not know apt's proxy.
  if [ -z "${http_proxy:-}" ] && command -v apt-config >/dev/null; then
    eval "$(apt-config shell http_proxy Acquire::http::Proxy)"
    [ -z "${http_proxy:-}" ] || export http_proxy
  fi
  # shellcheck disable=SC2086  # none or one option
  rm -rf --one-file-system "$builder" "$user" &&
    debootstrap --variant=minbase $include bookworm "$builder" "$mirror" &&
    copy_apt_settings "$builder" &&
    cp /etc/resolv.conf /etc/hosts "$builder/etc/" &&
    cp -a "$builder" "$user" &&
    git clone -q --no-hardlinks "$source_dir" "$builder/srv/lockstep"
}

tools() { inside "$builder" 'apt-get update; apt-get install -y --no-install-recommends make git'; }
train() { inside "$builder" 'cd /srv/lockstep; make train'; }
test_() { inside "$builder" 'cd /srv/lockstep; make test'; }
package() { inside "$builder" 'cd /srv/lockstep; make package'; }

install_() {
  rm -rf "$user/srv/package" "$user/srv/consumer" &&
    cp -r "$builder/srv/lockstep/build/package" "$user/srv/package" &&
    cp -r "$builder/srv/lockstep/examples/consumer" "$user/srv/consumer" &&
    inside "$user" 'apt-get update; apt-get install -y --no-install-recommends /srv/package/lockstep_*.deb; lockstep --version'
}

selftest() { inside "$user" 'lockstep selftest -n 2'; }

consumer() {
  # shellcheck disable=SC2016  # the variables are for the shell in there
  inside "$user" '
    apt-get install -y --no-install-recommends $(dpkg-query -W -f "\${Recommends}" lockstep | tr -d ,)
    cd /srv/consumer
    cmake -B build
    cmake --build build
    lockstep run -n 2 build/consumer >output
    cat output
    grep -q "ranks 2, mean gradient 3" output'
}

# ---- the run ----

table=""
finish() {
  status=$?
  trap - EXIT
  leave
  if [ -n "$table" ]; then
    printf '\n%-10s %8s\n' phase minutes
    printf '%s' "$table"
  fi
  exit $status
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

for name in $chosen; do
  echo "fresh_machine: $name; log: $folder/$name.log"
  case $name in
    test | install) function=${name}_ ;;
    *) function=$name ;;
  esac
  start=$(date +%s)
  result=""
  "$function" >"$folder/$name.log" 2>&1 || result="  failed"
  seconds=$(($(date +%s) - start))
  table="$table$(printf '%-10s %6d.%d%s' "$name" $((seconds / 60)) $((seconds % 60 / 6)) "$result")
"
  if [ -n "$result" ]; then
    tail -n 20 "$folder/$name.log" >&2
    echo "fresh_machine: $name failed; the whole log: $folder/$name.log" >&2
    exit 1
  fi
done
