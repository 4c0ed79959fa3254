#!/bin/sh
# Installs the Debian packages that the build needs, those that are missing. `install_packages.sh dev` adds what the
# checks of developers need: clang, sanitizer run times, the 64-bit Arm cross compiler and emulator.
set -eu
need="gcc g++ make git pkg-config libopenblas-dev libcjson-dev libxxhash-dev libpcre2-dev libutf8proc-dev libyaml-dev libmicrohttpd-dev"
[ "${1-}" = dev ] && need="$need clang libclang-rt-14-dev gcc-aarch64-linux-gnu qemu-user"
missing=""
for p in $need; do
    dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'install ok installed' || missing="$missing $p"
done
[ -z "$missing" ] && exit 0
command -v apt-get >/dev/null || { echo "missing packages:$missing (no apt-get here: install them by hand)" >&2; exit 1; }
root=""
[ "$(id -u)" = 0 ] || root=sudo
echo "installing:$missing"
$root apt-get update -qq
DEBIAN_FRONTEND=noninteractive $root apt-get install -y -qq --no-install-recommends $missing
