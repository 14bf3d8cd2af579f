#!/bin/sh
# Remakes train.txt and heldout.txt bit for bit from Debian's bible-kjv and bible-kjv-text (4.38).
# Usage: sh data/haystack/make.sh [FOLDER]      writes into FOLDER (default: beside this script)
set -eu
out=${1:-$(dirname "$0")}
export LC_ALL=C

# `bible` asks for more references on its terminal after the first; `q` leaves it. -f switches the page
# layout off, so that a line is one verse: "Ge1:1 In the beginning ...". cut drops the address.
verses() { echo q | bible -f "$1" | cut -d ' ' -f 2-; }

verses 'Gen1:1-1Sam31:13' > "$out/train.txt"
verses 'Matt1:1-Acts28:31' > "$out/heldout.txt"
