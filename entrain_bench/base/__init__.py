"""What everything else stands on: arrays, arithmetic with the same bits everywhere, errors, files, time."""
