#!/bin/sh
# Unpacks the 64-bit Arm versions of the libraries into the folder given, without installing them: for the cross build.
set -eu
out=$1
[ -e "$out/.complete" ] && exit 0
mkdir -p "$out/deb"
dpkg --print-foreign-architectures | grep -q arm64 || { dpkg --add-architecture arm64; apt-get update -qq; }
cd "$out/deb"
apt-get download -qq libopenblas0-pthread:arm64 libopenblas-pthread-dev:arm64 libgfortran5:arm64 libcjson1:arm64 \
    libcjson-dev:arm64 libxxhash0:arm64 libxxhash-dev:arm64 libpcre2-8-0:arm64 libpcre2-dev:arm64 libutf8proc2:arm64 \
    libutf8proc-dev:arm64 libyaml-0-2:arm64 libyaml-dev:arm64 libmicrohttpd12:arm64 libmicrohttpd-dev:arm64 \
    libgnutls30:arm64 libp11-kit0:arm64 libffi8:arm64 libidn2-0:arm64 libunistring2:arm64 libtasn1-6:arm64 libnettle8:arm64 \
    libhogweed6:arm64 libgmp10:arm64
for d in *.deb; do dpkg -x "$d" ..; done
# Debian chooses the BLAS through alternatives, which unpacking does not set
lib=../usr/lib/aarch64-linux-gnu
ln -sf openblas-pthread/libopenblas.so.0 "$lib/libopenblas.so.0"
ln -sf libopenblas.so.0 "$lib/libopenblas.so"
touch ../.complete
