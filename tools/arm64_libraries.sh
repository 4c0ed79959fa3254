#!/bin/sh
# Unpacks the 64-bit Arm versions of the libraries into the folder given, without installing them: for the cross build.
set -eu
out=$1
packages="libopenblas0-pthread libopenblas-pthread-dev libgfortran5 libcjson1 libcjson-dev libxxhash0 libxxhash-dev
    libpcre2-8-0 libpcre2-dev libutf8proc2 libutf8proc-dev libyaml-0-2 libyaml-dev libmicrohttpd12 libmicrohttpd-dev
    libgnutls30 libp11-kit0 libidn2-0 libunistring2 libtasn1-6 libnettle8 libhogweed6 libgmp10 libffi8"
# the stamp holds the list: an older folder is filled up
[ "$(cat "$out/.complete" 2>/dev/null)" = "$packages" ] && exit 0
mkdir -p "$out/deb"
dpkg --print-foreign-architectures | grep -q arm64 || { dpkg --add-architecture arm64; apt-get update -qq; }
cd "$out/deb"
names=""
for p in $packages; do names="$names $p:arm64"; done
apt-get download -qq $names
for d in *.deb; do dpkg -x "$d" ..; done
# Debian chooses the BLAS through alternatives, which unpacking does not set
lib=../usr/lib/aarch64-linux-gnu
ln -sf openblas-pthread/libopenblas.so.0 "$lib/libopenblas.so.0"
ln -sf libopenblas.so.0 "$lib/libopenblas.so"
printf '%s' "$packages" > ../.complete
