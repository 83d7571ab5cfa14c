# Time of each batch of cleaning, see 08_held_snapshot.sh. Set: data, picture.

set terminal svg size 900,450 font 'sans-serif,14' background rgb 'white'
set output picture
set datafile separator ','
set title 'Cleaning while a snapshot is held open'
set xlabel 'claims removed so far (thousands)'
set ylabel 'time of the batch (ms)'
set yrange [0:]
set grid ytics
set key bottom center outside horizontal
of(side, x) = strcol(1) eq side ? x : NaN
plot data using ($2 / 1e3):(of('idem', $3)) with points pointtype 7 pointsize 0.6 linecolor rgb '#0060ad' title 'idem: batches and slices of rescans', \
	'' using ($2 / 1e3):(of('hand_written_cleanup_any', $3)) with points pointtype 5 pointsize 0.6 linecolor rgb '#dd8800' title 'hand-written: DELETE ... ctid = ANY'
