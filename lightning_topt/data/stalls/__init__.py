"""The wait for data: measured, predicted for other set-ups, and reported."""
